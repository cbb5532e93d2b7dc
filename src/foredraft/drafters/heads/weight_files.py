"""What every reader of heads asks of a folder's files: safetensors, with floating-point weights."""

from __future__ import annotations

from pathlib import Path

from foredraft.errors import CheckpointError
from foredraft.model.hub import weights_to_come

__all__ = ["FLOATS", "has_weights", "not_downloaded", "refuse_pickles"]

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes of unquantized weights


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights that can be read."""
    return any(folder.glob("*.safetensors"))


def not_downloaded(head: Path) -> bool:
    """Return whether a head is a folder of the hub's cache whose weights were not fetched."""
    return head.is_dir() and not has_weights(head) and _pickle(head) is None and weights_to_come(head)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the weights in a folder are pickles alone; none is ever read."""
    pickle = _pickle(folder)
    if pickle is not None:
        raise CheckpointError(
            f"{pickle} is a pickle, which can run any program when it is read, so it is not read",
            remedy="convert it to model.safetensors, or give a copy of the head in that format",
        )


def _pickle(folder: Path) -> Path | None:
    """Return a pickle of a folder that has no weights in another format; None for other folders."""
    if has_weights(folder):
        return None
    return next((file for pattern in PICKLES for file in sorted(folder.glob(pattern))), None)
