"""A model's name -> a local folder: a path is taken as it is, `owner/name` is fetched from the Hugging Face
hub.

Contract: `huggingface_hub` keeps the cache, so its environment counts (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE), and what is in the cache is not fetched again. A connection that breaks is taken up where it
broke. Only the files that a model is read from are fetched, and weights only as safetensors: whatever else a
repository holds (pickles, GGUF, originals in folders of their own) stays there. Nothing is printed; how much
has come is reported.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError

__all__ = ["resolve"]

WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@(\S+))?")
MEGABYTE = 10**6

Report = Callable[[str, int, int], None]


def resolve(name_or_path: str | Path, revision: str | None = None, report: Report | None = None) -> Path:
    """The folder of a model.

    name_or_path: a folder, `owner/name`, or `owner/name@revision`. revision: a branch, a tag or a commit of a
    hub repository, by default its main branch. report: called as ("download", done, total), in megabytes.
    Raises ConfigError (a revision of what has none), CheckpointError (the rest).
    """
    folder = Path(name_or_path).expanduser()
    name = str(name_or_path)
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{name} is a local folder, which has no revision {revision!r}; leave the revision out"
            )
        return folder
    if folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder of a checkpoint")
    found = REPOSITORY.fullmatch(name)
    if found is None:
        raise CheckpointError(
            f"{name!r} is neither a folder nor a hub name of the form owner/name; check its spelling"
        )
    repository, at = found.groups()
    if at is not None and revision not in (None, at):
        raise ConfigError(f"{name} names another revision than {revision!r}; give one of them")
    return _fetch(repository, at or revision, report or _silent)


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _fetch(repository: str, revision: str | None, report: Report) -> Path:
    from huggingface_hub import snapshot_download

    name = repository if revision is None else f"{repository}@{revision}"
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(WANTED),
                tqdm_class=_reporting(report),
            )
        )
    except Exception as error:  # the hub lets errors of its http client through, whichever that is
        raise CheckpointError(_explained(error, repository, revision, name)) from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name} has no config.json on the hub; choose a checkpoint for transformers")
    if not any((folder / file).is_file() for file in WEIGHTS):
        raise CheckpointError(
            f"{name} has no model.safetensors on the hub; choose a repository or a revision with safetensors"
        )
    return folder


def _explained(error: Exception, repository: str, revision: str | None, name: str) -> str:
    """What went wrong and what to do, in one line."""
    from huggingface_hub import constants
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
        absent = f"{name} is not in the local hub cache, or not all of it, and"
        if constants.HF_HUB_OFFLINE:
            return f"{absent} HF_HUB_OFFLINE forbids to fetch it; unset that, or give a local folder"
        return f"{absent} the hub cannot be reached; go online, or give a local folder"
    line = next(iter(str(answer).strip().splitlines()), "") or type(answer).__name__
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
