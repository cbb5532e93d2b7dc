"""Where a model lies: a folder, a GGUF file or a hub id, with LoRAs or without, becomes its `ModelSource`.

Of the Hugging Face hub, only the files that a model is loaded from are downloaded: a checkpoint's folder, or
a GGUF file, of a type of weights that a name may have (`owner/name:Q4_K_M`). `huggingface_hub` manages the
cache, so its environment variables apply (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import glob
import io
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError, shortened
from foredraft.model.config import is_file_name
from foredraft.model.gguf.file import is_gguf
from foredraft.model.gguf.tensors import choose, models_among, part_names, shown_types
from foredraft.model.safetensors_file import INDEX, SINGLE
from foredraft.model.source import ModelSource, missing_files, source_of
from foredraft.model.spec import CONFIG, LORA_CONFIG, LORA_WEIGHTS, ModelSpec
from foredraft.model.tensor_names import AS_STORED

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]  # called with a stage, and how much of it is done and in total
HOST = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/")  # in front of a name, as Ollama spells it
MAX_LISTED = 20  # file names in a message
TIED, TEXT = "tie_word_embeddings", "text_config"  # keys of config.json


def resolve(
    name_or_path: str | Path,
    revision: str | None = None,
    report: OnProgress | None = None,
    *,
    weights: bool = True,
) -> ModelSource:
    """Return the model that a folder, a GGUF file or a hub id stands for."""
    path = locate(name_or_path, revision, report, weights=weights)
    downloaded = path.is_dir() and existing(name_or_path) is None  # a GGUF file may lie beside its weights
    return ModelSource(path) if downloaded else source_at(path)


def locate(
    name_or_path: str | Path,
    revision: str | None = None,
    report: OnProgress | None = None,
    *,
    weights: bool = True,
    drafter: bool = False,
) -> Path:
    """Return the local folder or GGUF file of a name; `owner/name` is downloaded if necessary.

    The name of a repository may have a type of weights, as llama.cpp and Ollama spell it
    (`owner/name:Q4_K_M`, `hf.co/owner/name:Q4_K_M`).
    """
    folder, name = existing(name_or_path), str(name_or_path)
    if folder is not None:
        if not folder.is_dir() and not is_gguf(folder):
            problem = f"{name} is a file, but not a GGUF file"
            raise CheckpointError(problem, remedy="give the folder of a checkpoint, or a GGUF file")
        if revision is not None:
            kind = "folder" if folder.is_dir() else "file"
            problem = f"{name} is a local {kind}, which has no revision {revision!r}"
            raise ConfigError(problem, remedy="leave the revision out")
        return folder
    match = REPOSITORY.fullmatch(HOST.sub("", name, count=1) if HOST.match(name) else name)
    if match is None:
        problem = f"{shortened(name)} is neither a folder nor a hub name of the form owner/name"
        raise CheckpointError(problem, remedy="check its spelling")
    repository, type, named = match.groups()
    if named is not None and revision not in (None, named):
        raise ConfigError(f"{name} names another revision than {revision!r}", remedy="give one of them")
    return Download(repository, type, named or revision, report, drafter=drafter).run(weights)


def existing(name: str | Path) -> Path | None:
    """Return the path if it exists; a name that no path can have does not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def source_at(path: Path) -> ModelSource:
    """Return the model of a folder, of the only GGUF file in it, or of a GGUF file."""
    if path.is_dir():
        if any((path / file).is_file() for file in (SINGLE, INDEX)):
            return ModelSource(path)
        try:
            models = models_among(sorted(file.name for file in path.iterdir() if file.is_file()))
        except OSError:
            models = []
        if len(models) > 1:
            listed = ", ".join(models) if len(models) <= MAX_LISTED else f"{len(models)} of them"
            raise CheckpointError(f"{path} holds several GGUF files: {listed}", remedy="give one of them")
        if not models:
            return ModelSource(path)
        path /= models[0]
    from foredraft.model.gguf.source import GGUFSource

    return GGUFSource(path)


def with_loras(
    base: ModelSource | Path, names: str | Path | Sequence[str | Path], report: OnProgress | None = None
) -> ModelSource:
    """Return a model with LoRAs, downloaded if necessary; without any, the model."""
    base = source_of(base)
    if not names:
        return base
    # Here and above, not at the top: most runs read a plain folder.
    from foredraft.model.lora.adapter import open_lora
    from foredraft.model.lora.merging import merge_loras, unties

    given = [names] if isinstance(names, str | Path) else names
    config, tied, made = base.config, base.spec.tied, copy(base)
    made._base, made.loras = base, tuple((str(name), resolve_lora(name, report)) for name in given)
    with ExitStack() as stack:
        opened = [open_lora(*lora, stack) for lora in made.loras]
        untied = tied and any(map(unties, opened))
    naming = AS_STORED if base.renamed else base.spec.naming
    made.merge = partial(merge_loras, made.loras, str(made), naming, untied)
    # the config says whether the head is the embedding: no tensor here can tell
    tied, text = tied and not untied, config.get(TEXT)
    inner = {TEXT: {**text, TIED: tied}} if isinstance(text, dict) and TIED in text else {}
    made.config = {**config, **inner, TIED: tied}
    made.spec = ModelSpec.from_hf(made.config, made.generation)
    return made


def resolve_lora(name: str | Path, report: OnProgress | None = None) -> Path:
    folder = existing(name)
    if folder is not None:
        if not folder.is_dir() and is_gguf(folder):
            problem = f"LoRA {name} is a GGUF file"
            raise CheckpointError(problem, remedy="give the folder that it was made from, as PEFT saves it")
        return folder.absolute()
    match = REPOSITORY.fullmatch(str(name))
    if match is None or match[2] is not None:
        problem = f"LoRA {shortened(str(name))} is neither a folder nor a hub name of the form owner/name"
        raise CheckpointError(problem, remedy="check its spelling")
    return Download(match[1], None, match[3], report).run_files((LORA_CONFIG, LORA_WEIGHTS))


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
CHOOSE = {  # file that a repository lacks -> what to choose
    CONFIG: "a checkpoint for transformers",
    SINGLE: "a repository or a revision with safetensors or GGUF files",
    **dict.fromkeys((LORA_CONFIG, LORA_WEIGHTS), "a repository that has it"),
}
MEGABYTE = 10**6


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
        present = self._files_of(folder)
        if (file := self._gguf_file(folder, present)) is not None:
            return folder / file
        if self.drafter and not (folder / INDEX).is_file():
            # a drafter's only safetensors file may have another name than a model's
            names = {file.name for file in folder.glob("*.safetensors")} if present is None else present
            files = [name for name in names if name.endswith(".safetensors") and is_file_name(name)]
            if len(files) == 1 and files[0] != SINGLE:
                missing = [name for name in (CONFIG, files[0]) if not (folder / name).is_file()]
        if present is not None and SINGLE in present:
            missing = [*({CONFIG} & {*missing}), SINGLE]
        self._check_present(missing, present)
        wanted = missing if weights else [*({CONFIG} & {*missing})]
        if wanted:
            self._fetch(folder.name, map(glob.escape, wanted))
        for name in wanted:
            if not (folder / name).is_file():
                raise self._incomplete_error(name)
        return folder

    def run_files(self, names: Sequence[str]) -> Path:
        folder = self._fetch(self.revision, (*map(glob.escape, names), ".gitattributes"))
        for name in names:
            if not (folder / name).is_file():
                self._check_present([name], self._files_of(folder))
                raise self._incomplete_error(name)
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
        self._check_present(missing, present)
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

    def _files_of(self, folder: Path) -> set[str] | None:
        """Return the names of the files that the hub has at a folder's commit; None where it does not answer.

        The weights come from the same commit, even if the branch moves meanwhile. `snapshot_download` does
        not tell whether it asked the hub or fell back to the cache.
        """
        from huggingface_hub import model_info
        from huggingface_hub.errors import HfHubHTTPError

        try:
            siblings = model_info(self.repository, revision=folder.name).siblings
            return {file.rfilename for file in siblings or ()}
        except HfHubHTTPError as error:
            raise self._hub_error(error, folder.name) from error
        except Exception:  # errors of the http client, and of HF_HUB_OFFLINE
            return None

    def _check_present(self, files: Iterable[str], present: set[str] | None) -> None:
        for file in files:
            if present is None:
                raise self._incomplete_error(file)
            if file not in present:
                source = "the name of its first part" if file.endswith(".gguf") else INDEX
                named = "" if file in CHOOSE else f", though {source} names it"
                remedy = f"choose {CHOOSE.get(file, 'another revision')}"
                raise CheckpointError(f"{self.name} has no {file} on the hub{named}", remedy=remedy)

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
                f"{shortened(name)} is neither a folder nor a name that the hub allows", "check its spelling"
            ),
        }  # fmt: skip
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
