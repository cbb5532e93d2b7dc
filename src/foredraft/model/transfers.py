"""Move values between host and device with as few synchronisations as possible, and name dtypes.

Contract: a round synchronises with the device once, at its end. `torch.tensor(values, device="cuda")` would
block the host until the device is idle, several times a round; a copy from pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu",)  # device types whose memory the host reads directly


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as options spell it, "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def on_host(tensor: Tensor) -> bool:
    """Return whether the host reads a tensor without waiting for a device."""
    return tensor.device.type in HOST


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy values to a device without blocking the host.

    Args:
        values: A tensor, or numbers or nested lists of them as `torch.tensor` takes them.
        device: The device to copy to.
        dtype: The dtype of the result; ignored for a tensor, which keeps its own.

    Returns:
        The tensor on the device; on a CPU a given tensor itself.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy several tensors to the host with a single synchronisation.

    Args:
        tensors: Tensors of integers, booleans or float32, all on one device.

    Returns:
        The same values on the host, in the same shapes; the tensors themselves if they are there already.
        Integers may arrive in a wider dtype.
    """
    if on_host(tensors[0]):
        return list(tensors)
    # float32 travels as int32 bits, so that one concatenation holds all dtypes without rounding
    integers = [bits(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in integers]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [_restored(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def bits(x: Tensor) -> Tensor:
    """Return the bits of a float32 tensor as int32, in the same shape."""
    return x.contiguous().view(torch.int32)


def _restored(part: Tensor, original: Tensor) -> Tensor:
    part = part.view(original.shape)
    return part.to(torch.int32).view(torch.float32) if original.is_floating_point() else part


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work, so that a timing covers it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_gib(size: int) -> str:
    """Return a number of bytes as people read it.

    Examples:
        >>> as_gib(3 * 2**30), as_gib(2**27)
        ('3.0 GiB', '0.125 GiB')
    """
    return f"{size / 2**30:.{1 if size >= 2**30 else 3}f} GiB"
