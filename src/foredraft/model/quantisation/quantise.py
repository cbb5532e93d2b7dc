"""Quantise: 16-bit weights -> codes of few bits, with a scale for every 32 columns.

A group's scale is the least-squares one for its codes: of several scales from the group's largest weight on,
each is replaced by the one that fits the codes that it gives best, and the best of all is kept. Codes are
those of the scale as it is stored, in bfloat16. `define` is the definition; a C kernel computes the same.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.compilation import declare, library
from foredraft.model.quantisation.codes import GROUP, PIECE, Codes, Coding

__all__ = ["BITS", "define", "quantise"]

BITS = {"int4": 4, "int8": 8}  # name -> bits of a code
# The largest weight of a group becomes the code -2 ** (bits - 1) times one of these.
SHARES = {4: (1.0, 0.95, 0.9, 0.85, 0.8), 8: (1.0,)}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of dtypes that the kernel takes


def quantise(weight: Tensor, bits: int) -> Codes:
    """Return a finite weight [M, K] as codes; K is a multiple of `GROUP`."""
    if library() is None or weight.device.type != "cpu" or weight.dtype not in NAMES:
        return define(weight, bits)
    weight = weight.contiguous()
    (rows, columns), shares = weight.shape, SHARES[bits]
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16)
    _kernel(weight.dtype)(
        weight.data_ptr(), rows, columns, bits, (c_float * len(shares))(*shares), len(shares),
        codes.data_ptr(), scales.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return Codes(codes, scales, GROUP, Coding(bits))


def define(weight: Tensor, bits: int) -> Codes:
    """Return what `quantise` returns, by PyTorch's operators."""
    rows, columns = weight.shape
    groups = columns // GROUP
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
    step = max(1, PIECE // columns)
    for row in range(0, rows, step):
        piece = weight[row : row + step].float().view(-1, groups, GROUP)
        coded, scale = _piece(piece, bits)
        codes[row : row + step] = coded.view(-1, columns)
        scales[row : row + step] = scale
    return Codes(codes, scales, GROUP, Coding(bits))


def _piece(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes [M, G, 32] and scales [M, G] of weights [M, G, 32]."""
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf, dtype=torch.float64)
    for share in SHARES[bits]:
        codes = _codes(w, extreme * (torch.tensor(share) / -(2 ** (bits - 1))), bits).double()
        squares = (codes * codes).sum(-1, keepdim=True)
        scale = ((codes * w).sum(-1, keepdim=True) / squares.clamp_min(1)).float().bfloat16().float()
        error = (_codes(w, scale, bits).double() * scale - w).square_().sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return _codes(w, best, bits).to(torch.int8), best.squeeze(-1).bfloat16()


def _codes(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (w * inverse).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round_()


@functools.cache
def _kernel(dtype: torch.dtype) -> Any:
    function = getattr(library(), f"foredraft_quantise_{NAMES[dtype]}")
    arguments = (
        c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int
    )  # fmt: skip
    return declare(function, arguments)
