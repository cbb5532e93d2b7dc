"""The order of additions of PyTorch's CUDA kernels, where it depends on a row's place or on the number of rows.

- `softmax` and `log_softmax` over more than 1,024 numbers (cunn_SoftMaxForward, aten/src/ATen/native/cuda/SoftMax.cu):
  the threads of a block stride over a row four numbers at a time, after the row's first numbers up to an address
  that is a multiple of 16 bytes. So where a row's length is no multiple of 4, its sum depends on its place.
- `cumsum` along the last dimension (tensor_kernel_scan_innermost_dim, ScanUtils.cuh): the number of threads of a
  row follows from the number of rows. A single row is scanned by another library (CUB).
- `sum` along the last dimension (Reduce.cuh): the number of threads of a row follows from the number of rows, and
  where they load vectors, the first numbers up to a multiple of 16 bytes are added apart. Rows that several blocks
  share (from 131,072 numbers on) are left out here.

Within `cuda_orders()` the pretended device adds as they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
BLOCK, VECTOR, WARP = 1024, 4, 32  # threads of a block, numbers of a vector load, threads of a warp
REDUCING = 512  # threads of a block that reduces
SOFTMAX, LOG_SOFTMAX = {aten.softmax, aten._softmax}, {aten.log_softmax, aten._log_softmax}
ORDERED = {*SOFTMAX, *LOG_SOFTMAX, aten.cumsum, aten.sum}
_on = False


@contextlib.contextmanager
def cuda_orders() -> Iterator[None]:
    """Add in the order of CUDA's kernels within the block."""
    global _on
    _on = True
    try:
        yield
    finally:
        _on = False


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on CPU tensors, in CUDA's order of additions within `cuda_orders()`."""
    packet = func.overloadpacket
    if not _on or packet not in ORDERED or args[0].dtype != torch.float32:
        return func(*args, **kwargs)
    x = args[0]
    last = len(args) > 1 and args[1] in (-1, x.dim() - 1, [-1], [x.dim() - 1])
    if packet in SOFTMAX | LOG_SOFTMAX and last and x.shape[-1] > BLOCK:
        return _softmax(x, log=packet in LOG_SOFTMAX)
    if packet is aten.cumsum and last and x.shape[-1] > 1:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) == 1:
            return func(*args, **kwargs)
        return running_sum(rows, scan_threads(*rows.shape)).view(x.shape)
    if packet is aten.sum and last and x.shape[-1] > BLOCK:
        keeps = len(args) > 2 and args[2]
        return _sum(x).view(*x.shape[:-1], *([1] if keeps else []))
    return func(*args, **kwargs)


def _softmax(x: Tensor, *, log: bool) -> Tensor:
    dense = x if x.is_contiguous() else x.contiguous()
    base = dense.storage_offset()
    rows = dense.view(-1, x.shape[-1])
    shifted = rows - rows.amax(-1, keepdim=True)
    powers = shifted.exp()
    totals = torch.stack(
        [sum_from_address(row, (base + at * len(row)) % VECTOR) for at, row in enumerate(powers)]
    )
    result = shifted - totals.log()[:, None] if log else powers / totals[:, None]
    return result.view(x.shape)


def _sum(x: Tensor) -> Tensor:
    dense = x if x.is_contiguous() else x.contiguous()
    base, rows = dense.storage_offset(), dense.view(-1, x.shape[-1])
    threads = reduce_threads(*rows.shape)
    places = [(base + at * rows.shape[1]) % VECTOR for at in range(len(rows))]
    return torch.stack([sum_by_threads(row, threads, at) for row, at in zip(rows, places, strict=True)])


def reduce_threads(rows: int, size: int) -> int:
    """Return the threads that add up a row of `size` numbers among so many rows."""
    widest = min(REDUCING, _power_of_two(size // VECTOR))
    height = min(_power_of_two(rows), REDUCING // min(widest, WARP))
    width = min(widest, REDUCING // height)
    each = -(-size // width)
    return width * height if each >= min(16 * height, 256) else width


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def sum_by_threads(row: Tensor, threads: int, shift: int) -> Tensor:
    """Return the sum of a row [V] by so many threads, whose address is `shift` past a vector's."""
    parts, rest = torch.zeros(threads, VECTOR), row
    if shift:
        parts[shift:, 0][: VECTOR - shift] += row[: VECTOR - shift]
        rest = row[VECTOR - shift :]
    whole = len(rest) // VECTOR * VECTOR
    for piece in rest[:whole].view(-1, VECTOR).split(threads):
        parts[: len(piece)] += piece
    parts[: len(rest) - whole, 0] += rest[whole:]
    sums = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
    while len(sums) > WARP:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    for level in range(len(sums).bit_length() - 1):
        step = 1 << level
        sums = torch.cat([sums[:-step] + sums[step:], sums[-step:]])
    return sums[0]


def sum_from_address(row: Tensor, shift: int) -> Tensor:
    """Return the sum of a row [V] as a block of threads adds it, whose address is `shift` past a vector's."""
    parts, rest = torch.zeros(BLOCK), row
    if shift:
        parts[shift:] += row[: BLOCK - shift]
        rest = row[BLOCK - shift :]
    whole = len(rest) // (BLOCK * VECTOR) * (BLOCK * VECTOR)
    for piece in rest[:whole].view(-1, BLOCK, VECTOR):
        for lane in range(VECTOR):
            parts += piece[:, lane]
    for at in range(whole, len(rest), BLOCK):
        piece = rest[at : at + BLOCK]
        parts[: len(piece)] += piece
    return _warp_sums(_warp_sums(parts.view(-1, WARP))[None])[0]


def _warp_sums(x: Tensor) -> Tensor:
    """Return the sums of warps [N, 32] by shuffles, [N]."""
    for offset in (16, 8, 4, 2, 1):
        x = x[:, :offset] + x[:, offset : 2 * offset]
    return x[:, 0]


def scan_threads(rows: int, size: int) -> int:
    """Return the binary logarithm of the threads that scan a row of `size` among so many rows."""
    return min(max(4, (9 + (size - 1).bit_length() - (rows - 1).bit_length()) // 2), 9)


def running_sum(x: Tensor, log_threads: int) -> Tensor:
    """Return the running sums of rows [N, V], each scanned by 2^log_threads threads."""
    width = 2 << log_threads
    found, before = torch.empty_like(x), torch.zeros(len(x))
    thread = torch.arange(width // 2)
    for at in range(0, x.shape[1], width):
        piece = x[:, at : at + width]
        buffer = torch.zeros(len(x), width)
        buffer[:, : piece.shape[1]] = piece
        buffer[:, 0] += before
        for level in range(log_threads + 1):
            step = 1 << level
            start = ((thread >> level) << (level + 1)) | step
            buffer[:, start + thread % step] += buffer[:, start - 1]
        before = buffer[:, -1]
        found[:, at : at + width] = buffer[:, : piece.shape[1]]
    return found
