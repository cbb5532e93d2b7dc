"""Kept states: the target's states on the disk, so that later epochs need not compute them.

It only saves time: a file that is missing, cut short, damaged or of another run is computed again.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.files import replacing
from foredraft.model.safetensors_file import SafetensorsFile, write_tensors
from foredraft.train.packed_documents import Packed
from foredraft.train.target import FrozenTarget, States

__all__ = ["KeptStates"]

TAPPED, LAST = "tapped", "last"
SPARE = 2**30  # bytes of the disk that are left to others


class KeptStates:
    """The target's states of groups, kept up to so many bytes.

    Args:
        target: Computes them.
        taps: The depths that the student reads.
        folder: Holds the files.
        most_bytes: Of all files; 0 keeps none.
    """

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...], folder: Path, most_bytes: int) -> None:
        self.target, self.taps, self.folder, self.most_bytes = target, taps, folder, most_bytes
        if most_bytes:
            folder.mkdir(parents=True, exist_ok=True)
        self.bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if most_bytes else 0
        self.computed = 0  # groups

    def states(self, group: int, packed: Packed) -> States:
        """Return the states of a group."""
        file = self.folder / f"{group}.safetensors"
        if self.most_bytes and file.is_file():
            with suppress(CheckpointError, KeyError), SafetensorsFile(file) as kept:
                device = packed.tokens.device
                found = {name: kept.get_tensor(name).to(device) for name in kept.keys()}  # noqa: SIM118
                tapped = found[TAPPED] if self.taps else None
                fits = tapped is None or self._are_states(tapped, len(packed.tokens), len(self.taps))
                if fits and self._are_states(found[LAST], len(packed.predicting), 1):
                    return States(tapped, found[LAST])
        states = self.target.states(packed, self.taps)
        self.computed += 1
        self._keep(file, states)
        return states

    def _are_states(self, values: Tensor, count: int, taps: int) -> bool:
        """Return whether values of a file can be states of this target, of so many columns and taps."""
        decoder = self.target.decoder
        fits = values.shape == (count, taps * decoder.spec.hidden_size) and values.dtype == decoder.dtype
        return fits and bool(torch.isfinite(values).all())

    def _keep(self, file: Path, states: States) -> None:
        tensors = {LAST: states.last} if states.tapped is None else {TAPPED: states.tapped, LAST: states.last}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not self.most_bytes or self.bytes + size > self.most_bytes:
            return
        if shutil.disk_usage(self.folder).free < size + SPARE:
            return
        with suppress(OSError), replacing(file) as new:
            write_tensors(new, tensors, {})
            self.bytes += size
