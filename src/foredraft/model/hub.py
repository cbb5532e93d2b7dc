"""Download a model from the Hugging Face hub: a checkpoint's folder, or a GGUF file of a repository,
of a type of weights that a name may have (`owner/name:Q4_K_M`).

`huggingface_hub` manages the cache, so its environment variables apply (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). Only the files that a model is loaded from are downloaded.
"""

from __future__ import annotations

import glob
import io
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import is_file_name
from foredraft.model.gguf.tensors import choose, models_among, part_names, shown_types
from foredraft.model.safetensors_file import INDEX, SINGLE
from foredraft.model.source import missing_files
from foredraft.model.spec import CONFIG

logger = logging.getLogger(__name__)

SMALL = (  # the files besides the weights
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
    ".gitattributes",  # every repository has it; the hub's client warns where it finds nothing to download
)
# owner/name, a type of weights after a colon, and a revision after @
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.-]+))?(?:@(\S+))?")
MEGABYTE = 10**6

OnProgress = Callable[[str, int, int], None]  # called with a stage, and how much of it is done and in total


class Download:
    def __init__(
        self,
        repository: str,
        type: str | None,
        revision: str | None,
        report: OnProgress | None,
        *,
        drafter: bool = False,
    ) -> None:
        self.repository, self.type, self.revision = repository, type, revision
        self.report, self.drafter = report or (lambda *_: None), drafter
        self.name = repository if revision is None else f"{repository}@{revision}"  # in error messages

    def run(self, weights: bool) -> Path:
        folder = self._fetch(self.revision, SMALL)
        missing = missing_files(folder)
        if not missing and self.type is None:
            return folder
        commit = folder.name  # the weights come from the same commit, even if the branch moves meanwhile
        present = self._files_of(commit)
        file = self._gguf_file(folder, present)
        if file is not None:
            return folder / file
        if self.drafter and not (folder / INDEX).is_file():
            # a drafter's only safetensors file may have another name than a model's
            names = {file.name for file in folder.glob("*.safetensors")} if present is None else present
            files = [name for name in names if name.endswith(".safetensors") and is_file_name(name)]
            if len(files) == 1 and files[0] != SINGLE:
                missing = [name for name in (CONFIG, files[0]) if not (folder / name).is_file()]
        if present is None and missing:
            raise self._incomplete_error(missing[0])
        if present is not None and SINGLE in present:
            missing = [*({CONFIG} & {*missing}), SINGLE]
        for name in missing:
            if present is not None and name not in present:
                raise self._file_error(name)
        wanted = missing if weights else [*({CONFIG} & {*missing})]
        if wanted:
            self._fetch(commit, map(glob.escape, wanted))
        for name in wanted:
            if not (folder / name).is_file():
                raise self._incomplete_error(name)
        return folder

    def run_files(self, names: Sequence[str]) -> Path:
        folder = self._fetch(self.revision, (*map(glob.escape, names), ".gitattributes"))
        for name in names:
            if not (folder / name).is_file():
                present = self._files_of(folder.name)
                if present is None or name in present:
                    raise self._incomplete_error(name)
                problem = f"{self.name} has no {name} on the hub"
                raise CheckpointError(problem, remedy="choose a repository that has it")
        return folder

    def _gguf_file(self, folder: Path, present: set[str] | None) -> str | None:
        kept = {file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf") if file.is_file()}
        names = kept if present is None else present
        if self.type is None and ({SINGLE, INDEX} & names or (folder / INDEX).is_file()):
            return None
        models = models_among(sorted(names))
        if self.drafter and (not models or self.type is not None):
            models += models_among(sorted(names), heads=True)
        chosen = choose(models, self.type)
        if chosen is None:
            if self.type is None:
                return None
            if present is None:
                raise self._incomplete_error(f"a GGUF file of type {self.type}")
            remedy = f"take one of {shown_types(models)}" if models else f"leave out :{self.type}"
            of = f" of type {self.type}" if models else ""
            raise CheckpointError(f"{self.name} has no GGUF file{of} on the hub", remedy=remedy)
        missing = [name for name in part_names(chosen) if name not in kept]
        for name in missing:
            if present is None:
                raise self._incomplete_error(name)
            if name not in present:
                raise self._file_error(name)
        if missing:
            self._fetch(folder.name, map(glob.escape, missing))
        if self.type is None and (len(models) > 1 or present is None):
            logger.warning(
                "%s: %s is taken of the GGUF files %s (%s); %s:TYPE takes another",
                self.name, chosen, "in the cache" if present is None else "on the hub", shown_types(models),
                self.repository,
            )  # fmt: skip
        return chosen

    def _fetch(self, revision: str | None, patterns: Iterable[str]) -> Path:
        from huggingface_hub import snapshot_download

        options: dict[str, Any] = {"revision": revision, "tqdm_class": _progress_class(self.report)}
        try:
            return Path(snapshot_download(self.repository, allow_patterns=[*patterns], **options))
        except Exception as error:  # errors of the http client, which differs between versions, pass through
            raise self._hub_error(error, self.revision) from error

    def _files_of(self, commit: str) -> set[str] | None:
        """Return the names of the files that the hub has at a commit; None where it does not answer.

        `snapshot_download` does not tell whether it asked the hub or fell back to the cache.
        """
        from huggingface_hub import model_info
        from huggingface_hub.errors import HfHubHTTPError

        try:
            siblings = model_info(self.repository, revision=commit).siblings
            return {file.rfilename for file in siblings or ()}
        except HfHubHTTPError as error:
            raise self._hub_error(error, commit) from error
        except Exception:  # errors of the http client, and of HF_HUB_OFFLINE
            return None

    def _file_error(self, file: str) -> CheckpointError:
        problem = f"{self.name} has no {file} on the hub"
        if file == CONFIG:
            return CheckpointError(problem, remedy="choose a checkpoint for transformers")
        if file == SINGLE:
            remedy = "choose a repository or a revision with safetensors or GGUF files"
            return CheckpointError(problem, remedy=remedy)
        source = "the name of its first part" if file.endswith(".gguf") else INDEX
        return CheckpointError(f"{problem}, though {source} names it", remedy="choose another revision")

    def _incomplete_error(self, file: str) -> CheckpointError:
        reason, remedy = _why_unreachable()
        problem = f"not all of {self.name} is in the local hub cache ({file} is missing), and {reason}"
        return CheckpointError(problem, remedy=remedy)

    def _hub_error(self, error: Exception, revision: str | None) -> CheckpointError:
        from huggingface_hub import errors as hub

        repository, name = self.repository, self.name
        login = "log in (`hf auth login`, or HF_TOKEN)"
        known: dict[type[Exception], tuple[str, str]] = {  # the first that fits counts
            hub.GatedRepoError: (f"{repository} is gated on the hub", f"accept its terms there and {login}"),
            hub.RepositoryNotFoundError: (
                f"{repository} is neither a local folder nor a model on the hub",
                f"check its spelling, or {login} if it is private",
            ),
            hub.RevisionNotFoundError: (
                f"{repository} has no revision {revision or 'main'!r} on the hub",
                "give one of its branches, tags or full commit hashes",
            ),
            hub.HFValidationError: (
                f"{shortened(name)} is neither a folder nor a name that the hub allows",
                "check its spelling",
            ),
        }
        for kind, (problem, remedy) in known.items():
            if isinstance(error, kind):
                return CheckpointError(problem, remedy=remedy)
        cached_only = isinstance(error, hub.LocalEntryNotFoundError)
        answer = error.__cause__ if cached_only else error  # a refusal hides behind the fallback to the cache
        if isinstance(answer, hub.HfHubHTTPError) and answer.response.status_code == 401:
            problem = f"the hub rejects the token sent for {name}"
            return CheckpointError(problem, remedy=f"{login} with another one")
        if cached_only and not isinstance(answer, hub.HfHubHTTPError):
            reason, remedy = _why_unreachable()
            problem = f"{name} is not in the local hub cache, or not all of it, and {reason}"
            return CheckpointError(problem, remedy=remedy)
        line = next(iter(str(answer).strip().splitlines()), "") or type(answer).__name__
        problem = f"{name} could not be downloaded from the hub ({line})"
        return CheckpointError(problem, remedy="try again, or give a local folder")


def _why_unreachable() -> tuple[str, str]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids downloading it", "unset HF_HUB_OFFLINE, or give a local folder"
    return "the hub cannot be reached", "go online, or give a local folder"


def _progress_class(report: OnProgress) -> type[Any]:
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class DownloadProgress(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # start no monitor thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # an argument of the hub's own bars
            super().__init__(*arguments, **(options | {"disable": False, "file": io.StringIO()}))

        def display(self, *arguments: Any, **options: Any) -> None:
            if self.unit == "B" and self.total:
                report("download", int(self.n // MEGABYTE), -int(-self.total // MEGABYTE))

    return DownloadProgress
