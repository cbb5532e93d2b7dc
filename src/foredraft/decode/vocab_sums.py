"""Sums over a vocabulary whose bits do not depend on the batch: softmax, running sums and totals.

On a CPU PyTorch adds each row in one order. Its CUDA kernels do not:

- `softmax` and `log_softmax` load four numbers at a time, and add the first ones of a row, up to an address
  that is a multiple of 16 bytes, before the others. Where V is no multiple of 4, the sum depends on the row's
  place in the batch (SoftMax.cu). So rows are padded with -inf to a multiple of 4.
- `cumsum` chooses the threads of a row by the number of rows, and scans a single row by another kernel
  (ScanUtils.cuh); so does `sum` (Reduce.cuh). So these sums are taken over integers, whose sum no order
  changes.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["log_softmax", "running", "softmax", "sums", "total"]

VECTOR: Final = 4  # float32 numbers that a CUDA kernel loads at once
# Units of 1 in a sum of integers: numbers of 2^-32 and more keep all bits, and sums up to 128 fit into 64
# bits. A softmax adds up to 1, and its entropy, in nats, to the logarithm of V at most.
UNITS: Final = 2.0**56


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of rows [..., V] float32."""
    padded = _padded(x)
    return x.softmax(-1) if padded is None else padded.softmax(-1)[..., : x.shape[-1]]


def log_softmax(x: Tensor) -> Tensor:
    """Return the logarithm of the softmax of rows [..., V] float32."""
    padded = _padded(x)
    return x.log_softmax(-1) if padded is None else padded.log_softmax(-1)[..., : x.shape[-1]]


def running(x: Tensor) -> Tensor:
    """Return the running sum of rows [..., V] float32, whose sums lie between -128 and 128."""
    return _numbers(_units(x).cumsum_(-1)) if x.is_cuda else x.cumsum(-1)


def total(x: Tensor) -> Tensor:
    """Return the last running sum of rows [..., V], as [..., 1]."""
    return _numbers(_units(x).sum(-1, keepdim=True)) if x.is_cuda else x.cumsum(-1)[..., -1:]


def sums(x: Tensor) -> Tensor:
    """Return the sum of rows [..., V], as [...]; on a CPU it may differ from `total` in the last bits."""
    return total(x)[..., 0] if x.is_cuda else x.sum(-1)


def _units(x: Tensor) -> Tensor:
    """Return numbers as integers; the product is exact, and what is below a unit is cut off."""
    return (x * UNITS).long()


def _numbers(units: Tensor) -> Tensor:
    return units.to(torch.float32).mul_(1 / UNITS)


def _padded(x: Tensor) -> Tensor | None:
    """Return rows padded for CUDA's kernels; None where they need none."""
    missing = -x.shape[-1] % VECTOR if x.is_cuda else 0
    return F.pad(x, (0, missing), value=-math.inf) if missing else None
