"""Host to device without waiting, and back by waiting once; and what a dtype is called.

Contract: the round reads the device once, at its end. A plain `torch.tensor(values, device="cuda")` would
make the host wait for all work under way, several times a round; a copy out of pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu",)  # devices whose memory the host reads as it lies


def dtype_name(dtype: torch.dtype) -> str:
    """As people and options spell it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device: `torch.tensor(values, dtype=dtype)` of numbers or lists, or a tensor as it is."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    pinned = device.type == "cuda" and made.device.type == "cpu"
    return (made.pin_memory() if pinned else made).to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers on the host, integers, booleans or float32, by one copy for which the host waits. What
    is there already is not copied."""
    if tensors[0].device.type in HOST:
        return list(tensors)
    whole = [bits(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in whole]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [_as_was(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def bits(x: Tensor) -> Tensor:
    """float32 as int32 that hold its bits."""
    return x.contiguous().view(torch.int32)


def _as_was(part: Tensor, tensor: Tensor) -> Tensor:
    part = part.view(tensor.shape)
    return part.to(torch.int32).view(torch.float32) if tensor.is_floating_point() else part


def synchronise(device: torch.device) -> None:
    """Wait for all that the device was told to do, where somebody takes times; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
