"""Host to device without waiting, and back by waiting once.

Contract: the round reads the device once, at its end. A plain `torch.tensor(values, device="cuda")` would
make the host wait for all work under way, several times a round; a copy out of pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu",)  # devices whose memory the host reads as it lies


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device: `torch.tensor(values, dtype=dtype)` of numbers or lists, or a tensor as it is."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    pinned = device.type == "cuda" and made.device.type == "cpu"
    return (made.pin_memory() if pinned else made).to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers on the host, of integers or booleans all: one copy, for which the host waits. What is
    there already is not copied."""
    if tensors[0].device.type in HOST:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def synchronise(device: torch.device) -> None:
    """Wait for all that the device was told to do, where somebody takes times; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
