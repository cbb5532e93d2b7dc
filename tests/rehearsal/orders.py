"""Additions in an order that depends on what it depends on in PyTorch's CUDA kernels; which order it is does not matter.

- `softmax` and `log_softmax` over more than 1,024 numbers (cunn_SoftMaxForward, aten/src/ATen/native/cuda/SoftMax.cu):
  a block's threads stride over a row four numbers at a time, after its first numbers up to an address that is a multiple
  of 16 bytes. So where a row's length is no multiple of 4, its sum depends on its place.
- `cumsum` along the last dimension (tensor_kernel_scan_innermost_dim, ScanUtils.cuh): the number of threads of a
  row follows from the number of rows. A single row is scanned by another library (CUB).
- `sum` along the last dimension (Reduce.cuh): the number of threads of a row follows from the number of rows, and
  where they load vectors, the first numbers up to a multiple of 16 bytes are added apart.

Within `cuda_orders()` the pretended device adds so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
BLOCK, VECTOR = 1024, 4  # threads of a block, numbers of a vector load
SOFTMAX, LOG_SOFTMAX = {aten.softmax, aten._softmax}, {aten.log_softmax, aten._log_softmax}
ORDERED = {*SOFTMAX, *LOG_SOFTMAX, aten.cumsum, aten.sum}
_on = False


@contextlib.contextmanager
def cuda_orders() -> Iterator[None]:
    """Add in the orders of CUDA's kernels within the block."""
    global _on
    _on = True
    try:
        yield
    finally:
        _on = False


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on CPU tensors, in an order of additions like CUDA's within `cuda_orders()`."""
    packet, x = func.overloadpacket, args[0] if args else None
    if not _on or packet not in ORDERED or x.dtype != torch.float32:
        return func(*args, **kwargs)
    last = len(args) > 1 and args[1] in (-1, x.dim() - 1, [-1], [x.dim() - 1])
    if not last or x.shape[-1] <= (1 if packet is aten.cumsum else BLOCK):
        return func(*args, **kwargs)
    dense = x if x.is_contiguous() else x.contiguous()
    rows, base = dense.view(-1, x.shape[-1]), dense.storage_offset()
    shifts = [(base + at * rows.shape[1]) % VECTOR for at in range(len(rows))]
    if packet is aten.cumsum:
        return running_sum(rows, len(rows)).view(x.shape)
    if packet is aten.sum:
        keeps = len(args) > 2 and args[2]
        return sums(rows, [VECTOR * len(rows) + shift for shift in shifts]).view(*x.shape[:-1], *[1] * keeps)
    shifted = rows - rows.amax(-1, keepdim=True)
    powers = shifted.exp()
    totals = sums(powers, shifts)[:, None]
    return (shifted - totals.log() if packet in LOG_SOFTMAX else powers / totals).view(x.shape)


def sums(rows: Tensor, orders: list[int]) -> Tensor:
    """Return the sum of each row [N, V], whose numbers are added in an order that a number decides."""
    random = (torch.Generator().manual_seed(order) for order in orders)
    each = [row[torch.randperm(len(row), generator=own)] for row, own in zip(rows, random, strict=True)]
    return torch.stack(each).sum(-1)


def running_sum(rows: Tensor, order: int) -> Tensor:
    """Return the running sums of rows [N, V], each scanned in pieces whose length a number decides."""
    found, before = torch.empty_like(rows), torch.zeros(len(rows), 1)
    for at in range(0, rows.shape[1], width := 15 + order):
        found[:, at : at + width] = before + rows[:, at : at + width].cumsum(-1)
        before = found[:, at : at + width][:, -1:]
    return found
