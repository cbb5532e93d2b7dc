"""The identity of a model: what hashes of it are made of, so that what was made for it finds it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.model.checkpoint import weight_headers
from foredraft.model.config import read_json
from foredraft.model.lora.record import base_of, lora_digests

__all__ = ["identity"]


def identity(folder: Path) -> dict[str, Any]:
    """Return a model's config.json, the names, dtypes and shapes of its tensors, and its LoRAs' digests.

    Raises:
        CheckpointError: The folder holds no model.
    """
    base, loras = base_of(folder), lora_digests(folder)
    known = {"config": read_json(base / "config.json"), "tensors": weight_headers(base)}
    return known | ({"loras": loras} if loras else {})
