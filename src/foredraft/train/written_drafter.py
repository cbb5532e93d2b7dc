"""Write what was trained: gathered from all processes, in the target's dtype, by the first of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from foredraft.drafters.heads.eagle3_files import CONFIG
from foredraft.drafters.heads.eagle3_writing import WEIGHTS
from foredraft.drafters.heads.settings import SETTINGS
from foredraft.errors import ConfigError
from foredraft.train.processes import Processes
from foredraft.train.students import Student

__all__ = ["holds_a_head", "write_drafter"]


def holds_a_head(is_kind: Callable[[Path], bool], folder: Path) -> bool:
    """Return whether a folder holds a head of a kind, and nothing besides."""
    return is_kind(folder) and {file.name for file in folder.iterdir()} <= {CONFIG, WEIGHTS, SETTINGS}


def write_drafter(
    student: Student,
    processes: Processes,
    dtype: torch.dtype,
    place: Path,
    write: Callable[[Mapping[str, Tensor]], None],
) -> None:
    """Write a student; all processes call this, and leave it together.

    Args:
        student: What was trained.
        processes: Each has a part of it.
        dtype: Of the floating-point tensors that are written.
        place: The folder, for messages.
        write: Writes the tensors whole or not at all; may raise OSError.

    Raises:
        ConfigError: They cannot be written.
    """
    tensors = processes.whole(student.tensors())
    if processes.first:
        halves = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        try:
            write(halves)
        except OSError as error:
            raise ConfigError(
                f"which cannot be written ({error.strerror})", option="out", value=str(place),
                remedy="give a folder that can be",
            ) from error  # fmt: skip
    processes.wait()
