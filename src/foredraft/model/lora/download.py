"""Turn the name of a LoRA into a local folder; `owner/name` is downloaded from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foredraft.errors import CheckpointError, shortened
from foredraft.model.gguf.file import is_gguf
from foredraft.model.hub import REPOSITORY, Download, existing
from foredraft.model.lora.record import CONFIG, WEIGHTS

__all__ = ["resolve_lora"]


def resolve_lora(name: str | Path, report: Callable[[str, int, int], None] | None = None) -> Path:
    """Return the local folder of a LoRA, downloading it if necessary.

    Args:
        name: A folder, `owner/name`, or `owner/name@revision`.
        report: Progress callback, called as ("download", done, total) in megabytes.

    Raises:
        CheckpointError: It does not exist, or cannot be downloaded.
    """
    folder = existing(name)
    if folder is not None:
        if not folder.is_dir() and is_gguf(folder):
            raise CheckpointError(
                f"LoRA {name} is a GGUF file",
                remedy="give the folder that it was made from, as PEFT saves it",
            )
        return folder
    match = REPOSITORY.fullmatch(str(name))
    if match is None or match[2] is not None:
        raise CheckpointError(
            f"LoRA {shortened(str(name))} is neither a folder nor a hub name of the form owner/name",
            remedy="check its spelling",
        )
    return Download(match[1], None, match[3], report).run_files((CONFIG, WEIGHTS))
