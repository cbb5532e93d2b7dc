"""A model's name -> a local folder: a path is taken as it is, `owner/name` is fetched from the Hugging Face
hub."""

from __future__ import annotations

import re
from pathlib import Path

from foredraft.errors import CheckpointError, ConfigError

WANTED = ("*.json", "*.safetensors", "*.jinja")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def resolve(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a model; `revision` is a branch, tag or commit of the hub."""
    folder = Path(name_or_path).expanduser()
    name = str(name_or_path)
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"revision {revision!r} was given with the local folder {name}; leave it out")
        return folder
    if folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder of a checkpoint")
    if not REPOSITORY.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is neither a folder nor a hub name of the form owner/name; check its spelling"
        )
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated on the hub; accept its terms there and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name} has no revision {revision!r} on the hub; check its spelling"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a local folder nor a model on the hub; check its spelling, or log in if it "
            "is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is not in the local hub cache and the hub cannot be reached; go online or give a local "
            "folder"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} could not be fetched from the hub ({_line(error)})") from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
