"""The folder of a model with LoRAs holds a record that names the model's own folder and the LoRAs.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.model.config import read_json

__all__ = [
    "CONFIG",
    "RECORD",
    "UNTIED",
    "WEIGHTS",
    "base_of",
    "is_lora",
    "lora_digests",
    "loras_of",
    "record_of",
]

RECORD = "foredraft_loras.json"  # of a folder that `folder.with_loras` made
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of a LoRA's folder
UNTIED = "untied"  # a key of the record
PIECE = 2**20  # bytes that are hashed at a time


def is_lora(folder: Path) -> bool:
    """Return whether a folder holds a LoRA rather than a model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def record_of(base: Path, loras: Sequence[tuple[str, Path]], *, untied: bool) -> dict[str, Any]:
    """Return the record of a folder.

    Args:
        base: The model's own folder.
        loras: The names of the LoRAs, for display, and their folders.
        untied: The model's head is tied to its embedding, but no longer with the LoRAs.
    """
    listed = [{"name": name, "folder": str(folder.absolute())} for name, folder in loras]
    return {"base": str(base.absolute()), "loras": listed, UNTIED: untied}


def base_of(folder: Path) -> Path:
    """Return the folder of the model without LoRAs; a folder without a record is that itself."""
    return Path(read_json(folder / RECORD)["base"]) if (folder / RECORD).is_file() else folder


def loras_of(folder: Path) -> list[tuple[str, Path]]:
    """Return the LoRAs of a folder in their order: their names, for display, and their folders."""
    if not (folder / RECORD).is_file():
        return []
    return [(each["name"], Path(each["folder"])) for each in read_json(folder / RECORD)["loras"]]


def lora_digests(folder: Path) -> list[str]:
    """Return the SHA-256 digest of each LoRA's two files.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return [_digest(lora) for _, lora in loras_of(folder)]


def _digest(lora: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with (lora / name).open("rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(
                f"{lora / name} cannot be read ({error.strerror})", remedy="give the LoRA again"
            ) from error
    return digest.hexdigest()
