"""A model's name -> a local folder: a path is taken as it is, `owner/name` is fetched from the Hugging Face
hub."""

from __future__ import annotations

import re
from pathlib import Path

from foredraft.errors import CheckpointError

WANTED = ("*.json", "*.safetensors", "*.jinja")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model."""
    folder = Path(name_or_path).expanduser()
    name = str(name_or_path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{name} is a file; give the folder of a checkpoint")
    if not REPOSITORY.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is neither a folder nor a hub name of the form owner/name; check its spelling"
        )
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated on the hub; accept its terms there and log in with `hf auth login`"
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
    except Exception as error:  # the hub lets errors of its http client through, whichever that is
        raise CheckpointError(
            f"{name} could not be fetched from the hub ({_line(error)}); try again, or give a local folder"
        ) from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
