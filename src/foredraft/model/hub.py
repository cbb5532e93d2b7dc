"""Turn the name of a model into a local folder; `owner/name` is downloaded from the Hugging Face hub.

A local GGUF file is turned into a folder, too (`model.gguf`).

Contract: `huggingface_hub` manages the cache, so its environment variables apply (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). Cached files are not downloaded again, and an interrupted download resumes. Only
the files that a model is loaded from are downloaded: first the small ones, then the weights, which are one
safetensors file or the shards that the index lists. Other files of the repository (pickles, GGUF, further
precisions, subfolders) are left out. Nothing is printed; a callback receives the progress.
"""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError, shortened
from foredraft.model.config import is_file_name, read_json
from foredraft.model.gguf.file import is_gguf
from foredraft.model.gguf.folder import checkpoint_folder

__all__ = ["resolve", "weights_to_come"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SMALL = (  # the files besides the weights
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
)
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@(\S+))?")  # owner/name, and a revision after @
MEGABYTE = 10**6

Report = Callable[[str, int, int], None]  # called with a stage, and how much of it is done and in total


def resolve(
    name_or_path: str | Path,
    revision: str | None = None,
    report: Report | None = None,
    *,
    weights: bool = True,
) -> Path:
    """Return the local folder of a model, downloading it if necessary.

    Args:
        name_or_path: A folder, a GGUF file, `owner/name`, or `owner/name@revision`.
        revision: A branch, a tag or a commit of the hub repository; None is its main branch.
        report: Progress callback, called as ("download", done, total) in megabytes.
        weights: Download the weights too. Otherwise the hub is only asked whether it has them.

    Raises:
        ConfigError: A local folder is given with a revision, or two different revisions are given.
        CheckpointError: The model does not exist, cannot be downloaded, or is a broken GGUF file.
    """
    folder = _existing(name_or_path)
    name = str(name_or_path)
    if folder is not None and (folder.is_dir() or is_gguf(folder)):
        kind = "folder" if folder.is_dir() else "file"
        if revision is not None:
            raise ConfigError(
                f"{name} is a local {kind}, which has no revision {revision!r}",
                remedy="leave the revision out",
            )
        return folder if folder.is_dir() else checkpoint_folder(folder)
    if folder is not None:
        raise CheckpointError(
            f"{name} is a file, but not a GGUF file", remedy="give the folder of a checkpoint, or a GGUF file"
        )
    match = REPOSITORY.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{shortened(name)} is neither a folder nor a hub name of the form owner/name",
            remedy="check its spelling",
        )
    repository, named = match.groups()
    if named is not None and revision not in (None, named):
        raise ConfigError(f"{name} names another revision than {revision!r}", remedy="give one of them")
    return _Download(repository, named or revision, report or _silent).run(weights)


def weights_to_come(folder: Path) -> bool:
    """Return whether a folder of the hub's cache lacks weights, as after `resolve` with weights=False."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return folder.is_relative_to(HF_HUB_CACHE) and any(file != CONFIG for file in _missing(folder))


def _existing(name: str | Path) -> Path | None:
    """Return the path if it exists; a name that no path can have does not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _silent(stage: str, done: int, total: int) -> None:
    return None


class _Download:
    """The download of one repository at one revision."""

    def __init__(self, repository: str, revision: str | None, report: Report) -> None:
        self.repository, self.revision, self.report = repository, revision, report
        self.name = repository if revision is None else f"{repository}@{revision}"  # in error messages

    def run(self, weights: bool) -> Path:
        """Download the files of a model, with or without its weights, and return their folder."""
        folder = self._fetch(self.revision, SMALL)
        commit = folder.name  # the weights come from the same commit, even if the branch moves meanwhile
        if missing := _missing(folder):
            present = self._files_of(commit, missing[0])
            if SINGLE in present:
                missing = [*({CONFIG} & {*missing}), SINGLE]
            for file in missing:
                if file not in present:
                    raise self._file_error(file)
            wanted = missing if weights else [*({CONFIG} & {*missing})]
            if wanted:
                self._fetch(commit, map(glob.escape, wanted))
        for file in _missing(folder):
            if weights or file == CONFIG:
                raise self._incomplete_error(file)
        return folder

    def _fetch(self, revision: str | None, patterns: Iterable[str]) -> Path:
        """Download the files that match one of the patterns."""
        from huggingface_hub import snapshot_download

        progress = _progress_class(self.report)
        try:
            return Path(
                snapshot_download(
                    self.repository, revision=revision, allow_patterns=[*patterns], tqdm_class=progress
                )
            )
        except Exception as error:  # errors of the http client, which differs between versions, pass through
            raise self._hub_error(error, self.revision) from error

    def _files_of(self, commit: str, missing: str) -> set[str]:
        """Return the names of the files that the hub has at a commit.

        `snapshot_download` does not tell whether it asked the hub or fell back to the cache. If the hub does
        not answer here, the file `missing` is missing in the cache, not necessarily on the hub.
        """
        from huggingface_hub import model_info
        from huggingface_hub.errors import HfHubHTTPError

        try:
            siblings = model_info(self.repository, revision=commit).siblings
            return {file.rfilename for file in siblings or ()}
        except HfHubHTTPError as error:
            raise self._hub_error(error, commit) from error
        except Exception as error:  # errors of the http client, and of HF_HUB_OFFLINE
            raise self._incomplete_error(missing) from error

    def _file_error(self, file: str) -> CheckpointError:
        """Return the error of a file that the hub does not have."""
        problem = f"{self.name} has no {file} on the hub"
        if file == CONFIG:
            return CheckpointError(problem, remedy="choose a checkpoint for transformers")
        if file == SINGLE:
            return CheckpointError(problem, remedy="choose a repository or a revision with safetensors")
        return CheckpointError(f"{problem}, though {INDEX} names it", remedy="choose another revision")

    def _incomplete_error(self, file: str) -> CheckpointError:
        """Return the error of a file that the cache does not have and the hub cannot give."""
        reason, remedy = _why_unreachable()
        return CheckpointError(
            f"not all of {self.name} is in the local hub cache ({file} is missing), and {reason}",
            remedy=remedy,
        )

    def _hub_error(self, error: Exception, revision: str | None) -> CheckpointError:
        """Return the CheckpointError for an error of the hub or its client."""
        from huggingface_hub import errors as hub

        repository, name = self.repository, self.name
        login = "log in (`hf auth login`, or HF_TOKEN)"
        if isinstance(error, hub.GatedRepoError):
            return CheckpointError(
                f"{repository} is gated on the hub", remedy=f"accept its terms there and {login}"
            )
        if isinstance(error, hub.RepositoryNotFoundError):
            return CheckpointError(
                f"{repository} is neither a local folder nor a model on the hub",
                remedy=f"check its spelling, or {login} if it is private",
            )
        if isinstance(error, hub.RevisionNotFoundError):
            return CheckpointError(
                f"{repository} has no revision {revision or 'main'!r} on the hub",
                remedy="give one of its branches, tags or full commit hashes",
            )
        if isinstance(error, hub.HFValidationError):
            return CheckpointError(
                f"{shortened(name)} is neither a folder nor a name that the hub allows",
                remedy="check its spelling",
            )
        cached_only = isinstance(error, hub.LocalEntryNotFoundError)
        answer = error.__cause__ if cached_only else error  # a refusal hides behind the fallback to the cache
        if isinstance(answer, hub.HfHubHTTPError) and answer.response.status_code == 401:
            return CheckpointError(
                f"the hub rejects the token sent for {name}", remedy=f"{login} with another one"
            )
        if cached_only and not isinstance(answer, hub.HfHubHTTPError):
            reason, remedy = _why_unreachable()
            return CheckpointError(
                f"{name} is not in the local hub cache, or not all of it, and {reason}", remedy=remedy
            )
        line = next(iter(str(answer).strip().splitlines()), "") or type(answer).__name__
        return CheckpointError(
            f"{name} could not be downloaded from the hub ({line})",
            remedy="try again, or give a local folder",
        )


def _why_unreachable() -> tuple[str, str]:
    """Return why the hub cannot be asked, and the remedy."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloading it", "unset HF_HUB_OFFLINE, or give a local folder"
    return "the hub cannot be reached", "go online, or give a local folder"


def _missing(folder: Path) -> list[str]:
    """Return the required files that are not in the folder."""
    weights = _shards(folder) if (folder / INDEX).is_file() else [SINGLE]
    if (folder / SINGLE).is_file():
        weights = []
    return [file for file in (CONFIG, *weights) if not (folder / file).is_file()]


def _shards(folder: Path) -> list[str]:
    """Return the files that the index lists; `checkpoint.py` reports a malformed index."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    files = {*map(str, weight_map.values())} if isinstance(weight_map, dict) else set()
    return sorted(filter(is_file_name, files))


def _progress_class(report: Report) -> type[Any]:
    """Return a progress bar class for the hub that shows nothing and reports downloaded bytes."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class Progress(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # start no monitor thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # an argument of the hub's own bars
            super().__init__(*arguments, **(options | {"disable": False, "file": io.StringIO()}))

        def display(self, *arguments: Any, **options: Any) -> None:
            if self.unit == "B" and self.total:
                report("download", int(self.n // MEGABYTE), -int(-self.total // MEGABYTE))

    return Progress
