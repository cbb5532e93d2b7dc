"""What is decided over a vocabulary, a row at a time, and the noise that decides: float32 rows on the CPU,
where the kernels are loaded.

Contract: each function gives None where it does not serve, and its caller's own definition holds. A row's
result is the same alone and among others.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.loading import loaded

__all__ = ["best", "law", "noise_keys", "race", "residual", "surest", "units"]

SIGNATURES: dict[str, tuple[type, ...]] = {
    "best": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "law": (*(c_void_p,) * 6, *(c_int64,) * 3, c_void_p, c_void_p, c_int),
    "residual": (*(c_void_p,) * 4, c_int64, c_int64, c_void_p),
    "race": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "surest": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "keys": (*(c_void_p,) * 4, *(c_int64,) * 3, c_void_p),
    "units": (c_void_p, c_int64, c_void_p),
}


def best(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where every row [..., V] is largest, first of all: int64 [...]; whether that value is finite: bool."""
    run = _serving("best", x)
    if run is None:
        return None
    x = x.contiguous()  # rows may lie apart or not, by what shared their pass
    shape, columns = x.shape[:-1], x.shape[-1]
    ids, finite = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.bool)
    run(x.data_ptr(), ids.numel(), columns, ids.data_ptr(), finite.data_ptr(), torch.get_num_threads())
    return ids, finite


def law(
    x: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """softmax(x / temperature) of every row [B, T, V], cut by top_k, top_p and min_p, and whether its largest
    value is finite [B, T] bool; the parameters and cut (whether top_p or min_p cuts) [B]."""
    run = _serving("law", x)
    if run is None:
        return None
    assert temperature.dtype == torch.float32  # what it lies as is what the kernel reads
    x = x.contiguous()
    batch, columns, size = x.shape
    probs, finite = x.new_empty(x.shape), x.new_empty((batch, columns), dtype=torch.bool)
    options = map(_address, (temperature, top_k, top_p, min_p, cut))
    outs = probs.data_ptr(), finite.data_ptr()
    run(x.data_ptr(), *options, columns, batch * columns, size, *outs, torch.get_num_threads())
    return probs, finite


def surest(x: Tensor) -> Tensor | None:
    """The probability of every row's likeliest token [..., V] -> [...], by softmax as it is; NaN where it is
    not finite."""
    run = _serving("surest", x)
    if run is None:
        return None
    x = x.contiguous()
    out = x.new_empty(x.shape[:-1])
    run(x.data_ptr(), out.numel(), x.shape[-1], out.data_ptr(), torch.get_num_threads())
    return out


def residual(p: Tensor, q: Tensor, where: Tensor) -> Tensor | None:
    """What is positive of p - q in the rows [..., V] where `where` [...] says so and anything is, else p.

    q: [..., V], or the one id that it is certain of [...] int64.
    """
    run = _serving("residual", p)
    if run is None:
        return None
    p, q, where = p.contiguous(), q.contiguous(), where.contiguous()
    out = p.new_empty(p.shape)
    certain = q.dtype == torch.int64
    law_of, id_of = (None, q.data_ptr()) if certain else (q.data_ptr(), None)
    run(p.data_ptr(), law_of, id_of, where.data_ptr(), where.numel(), p.shape[-1], out.data_ptr())
    return out


def race(weights: Tensor, keys: Tensor) -> Tensor | None:
    """The winners of the exponential race of each row [..., V], by the noise of its key [...] -> [...]."""
    run = _serving("race", weights)
    if run is None:
        return None
    weights, keys = weights.contiguous(), keys.contiguous()
    out = keys.new_empty(keys.shape)
    size = weights.shape[-1]
    run(weights.data_ptr(), keys.data_ptr(), keys.numel(), size, out.data_ptr(), torch.get_num_threads())
    return out


def noise_keys(
    base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
) -> Tensor | None:
    """`decode.noise`'s hash of the fields of a key: base and rounds [B], position and attempt [B, T], all
    int64 -> [B, T]."""
    run = _serving("keys", position, torch.int64)
    if run is None:
        return None
    fields = [None if x is None else x.contiguous() for x in (base, rounds, position, attempt)]
    out = position.new_empty(position.shape)
    run(*map(_address, fields), purpose, *position.shape, out.data_ptr())
    return out


def units(keys: Tensor) -> Tensor | None:
    """Uniform in [0, 1), 53 bits of each key: int64 -> float64, of the same shape."""
    run = _serving("units", keys, torch.int64)
    if run is None:
        return None
    keys = keys.contiguous()
    out = keys.new_empty(keys.shape, dtype=torch.float64)
    run(keys.data_ptr(), keys.numel(), out.data_ptr())
    return out


def _serving(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> Any | None:
    """The kernel for such rows."""
    kernels: ctypes.CDLL | None = loaded()
    if kernels is None or x.dtype != dtype or x.device.type != "cpu":
        return None
    run: Any = getattr(kernels, f"foredraft_{name}")
    if run.argtypes is None:
        run.argtypes, run.restype = SIGNATURES[name], None
    return run


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
