"""A model's name -> a local folder: a path is taken as it is, `owner/name` is fetched from the Hugging Face
hub.

Contract: `huggingface_hub` keeps the cache, so its environment counts (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE), and what is in the cache is not fetched again. A connection that breaks is taken up where it
broke. Only the files that a model is read from are fetched, first the small ones, then the weights: one file
of safetensors, or those that the index names. Whatever else a repository holds (pickles, GGUF, other
precisions, originals in folders of their own) stays there. Nothing is printed; how much has come is reported.
"""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.config import read_json, shortened

__all__ = ["resolve"]

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SMALL = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
)
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@(\S+))?")
MEGABYTE = 10**6

Report = Callable[[str, int, int], None]


def resolve(name_or_path: str | Path, revision: str | None = None, report: Report | None = None) -> Path:
    """The folder of a model.

    name_or_path: a folder, `owner/name`, or `owner/name@revision`. revision: a branch, a tag or a commit of a
    hub repository, by default its main branch. report: called as ("download", done, total), in megabytes.
    Raises ConfigError (a revision of what has none), CheckpointError (the rest).
    """
    folder = _existing(name_or_path)
    name = str(name_or_path)
    if folder is not None and folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{name} is a local folder, which has no revision {revision!r}; leave the revision out"
            )
        return folder
    if folder is not None:
        raise CheckpointError(f"{name} is a file; give the folder of a checkpoint")
    found = REPOSITORY.fullmatch(name)
    if found is None:
        raise CheckpointError(
            f"{shortened(name)} is neither a folder nor a hub name of the form owner/name; check its spelling"
        )
    repository, at = found.groups()
    if at is not None and revision not in (None, at):
        raise ConfigError(f"{name} names another revision than {revision!r}; give one of them")
    return _fetch(repository, at or revision, report or _silent)


def _existing(name: str | Path) -> Path | None:
    """The path, if something is there. What is too long for a name, or in nobody's home, is not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _fetch(repository: str, revision: str | None, report: Report) -> Path:
    from huggingface_hub import snapshot_download

    name = repository if revision is None else f"{repository}@{revision}"

    def fetched(at: str | None, patterns: Iterable[str]) -> Path:
        try:
            return Path(
                snapshot_download(
                    repository, revision=at, allow_patterns=[*patterns], tqdm_class=_reporting(report)
                )
            )
        except Exception as error:  # the hub lets errors of its http client through, whichever that is
            raise CheckpointError(_explained(error, repository, revision, name)) from error

    folder = fetched(revision, SMALL)
    commit = folder.name  # what follows is of the same one, should the branch move on
    if missing := _missing(folder):
        there = _listed(repository, commit, name, missing[0])
        if SINGLE in there:
            missing = [*({CONFIG} & {*missing}), SINGLE]
        for file in missing:
            if file not in there:
                raise CheckpointError(_lacking(file, name))
        fetched(commit, map(glob.escape, missing))
    for file in _missing(folder):
        raise CheckpointError(_partial(file, name))
    return folder


def _missing(folder: Path) -> list[str]:
    """The files that a model cannot be read without and that are not in the folder."""
    weights = _shards(folder) if (folder / INDEX).is_file() else [SINGLE]
    if (folder / SINGLE).is_file():
        weights = []
    return [file for file in (CONFIG, *weights) if not (folder / file).is_file()]


def _shards(folder: Path) -> list[str]:
    """The files that the index names. One that is malformed is refused where the weights are read."""
    listed = read_json(folder / INDEX).get("weight_map")
    files = {*map(str, listed.values())} if isinstance(listed, dict) else set()
    return sorted(file for file in files if Path(file).name == file)


def _listed(repository: str, commit: str, name: str, missing: str) -> set[str]:
    """What the hub has at a commit. `snapshot_download` does not tell whether it asked or, since nobody
    answered, took what the cache has; without an answer, a file is missing in the cache, not on the hub."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return {file.rfilename for file in model_info(repository, revision=commit).siblings or ()}
    except HfHubHTTPError as error:
        raise CheckpointError(_explained(error, repository, commit, name)) from error
    except Exception as error:  # of the http client, or that it is to keep offline
        raise CheckpointError(_partial(missing, name)) from error


def _lacking(file: str, name: str) -> str:
    """What to do about a file that the hub has not."""
    if file == CONFIG:
        return f"{name} has no {file} on the hub; choose a checkpoint for transformers"
    if file == SINGLE:
        return f"{name} has no {file} on the hub; choose a repository or a revision with safetensors"
    return f"{name} has no {file} on the hub, though {INDEX} names it; choose another revision"


def _partial(file: str, name: str) -> str:
    return f"not all of {name} is in the local hub cache ({file} is missing), and {_out_of_reach()}"


def _out_of_reach() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to fetch it; unset that, or give a local folder"
    return "the hub cannot be reached; go online, or give a local folder"


def _explained(error: Exception, repository: str, revision: str | None, name: str) -> str:
    """What went wrong and what to do, in one line."""
    from huggingface_hub import errors as hub

    login = "log in (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, hub.GatedRepoError):
        return f"{repository} is gated on the hub; accept its terms there and {login}"
    if isinstance(error, hub.RepositoryNotFoundError):
        return (
            f"{repository} is neither a local folder nor a model on the hub; check its spelling, or {login}"
            " if it is private"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return (
            f"{repository} has no revision {revision or 'main'!r} on the hub; give a branch, a tag or a whole"
            " commit hash of it"
        )
    answer = error.__cause__ if isinstance(error, hub.LocalEntryNotFoundError) else error
    if isinstance(answer, hub.HfHubHTTPError) and answer.response.status_code == 401:
        return f"the hub refuses the token that it got for {name}; {login} with another one"
    if isinstance(error, hub.LocalEntryNotFoundError) and not isinstance(answer, hub.HfHubHTTPError):
        return f"{name} is not in the local hub cache, or not all of it, and {_out_of_reach()}"
    line = next(iter(str(answer).strip().splitlines()), "") or type(answer).__name__
    if isinstance(error, hub.HFValidationError):
        return f"{shortened(name)} is neither a folder nor a name that the hub allows; check its spelling"
    return f"{name} could not be fetched from the hub ({line}); try again, or give a local folder"


def _reporting(report: Report) -> type[Any]:
    """What the hub takes for its progress bars: those that count bytes report, none shows."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that wakes them up

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # of the hub's own bars
            super().__init__(*arguments, **(options | {"disable": False, "file": io.StringIO()}))

        def display(self, *arguments: Any, **options: Any) -> None:
            if self.unit == "B" and self.total:
                report("download", int(self.n // MEGABYTE), -int(-self.total // MEGABYTE))

    return Reporting
