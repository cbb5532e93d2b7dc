"""What is decided over a vocabulary, a row at a time: float32 rows on the CPU, where the kernels are loaded.

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

__all__ = ["best", "nucleus", "race", "softmax", "trim"]


def best(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where every row [..., V] is largest, first of all, and that value, NaN where there is one: two times
    [...]."""
    kernels = _serving(x)
    if kernels is None:
        return None
    ids, tops = x.new_empty(x.shape[:-1], dtype=torch.int64), x.new_empty(x.shape[:-1])
    _call(kernels.foredraft_best, x, (), ids, tops)
    return ids, tops


def softmax(x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor] | None:
    """softmax(x / temperature) of every row [..., V], and its largest value [...], NaN where there is one;
    temperature [...]."""
    kernels = _serving(x)
    if kernels is None:
        return None
    probs, tops = x.new_empty(x.shape), x.new_empty(x.shape[:-1])
    _call(kernels.foredraft_softmax, x, (_alike(temperature, x),), probs, tops)
    return probs, tops


def trim(probs: Tensor, least: Tensor, cut: Tensor) -> bool:
    """In place: what is below `least` becomes 0, and rows [..., V] that are `cut` sum to one again; least and
    cut [...]. Whether that was done."""
    kernels = _serving(probs)
    if kernels is None or not probs.is_contiguous():
        return False
    _call(kernels.foredraft_trim, probs, (_alike(least, probs), _alike(cut, probs)))
    return True


def nucleus(probs: Tensor, mass: Tensor) -> Tensor | None:
    """The least probability that a nucleus of `mass` [...] keeps of each row [..., V] -> [...]: that of the
    last token, from the likeliest down, with less than the mass ranked above it."""
    kernels = _serving(probs)
    if kernels is None:
        return None
    out = probs.new_empty(probs.shape[:-1])
    _call(kernels.foredraft_nucleus, probs, (_alike(mass, probs),), out)
    return out


def race(weights: Tensor, keys: Tensor) -> Tensor | None:
    """The winners of the exponential race of each row [..., V], by the noise of its key [...] -> [...]."""
    kernels = _serving(weights)
    if kernels is None:
        return None
    out = keys.new_empty(weights.shape[:-1])
    _call(kernels.foredraft_race, weights, (_alike(keys, weights),), out)
    return out


def _serving(x: Tensor) -> ctypes.CDLL | None:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    return loaded()


def _alike(values: Tensor, x: Tensor) -> Tensor:
    """One for every row of x."""
    return values.expand(x.shape[:-1]).contiguous()


def _call(function: Any, x: Tensor, others: tuple[Tensor, ...], *outs: Tensor) -> None:
    """One of the kernels: x, what else it reads of each row, how many rows and columns, and the results."""
    x, columns = x.contiguous(), x.shape[-1]  # rows may lie apart or not, by what shared their pass
    rows = x.numel() // max(columns, 1)
    if function.argtypes is None:
        function.argtypes = (
            *(c_void_p,) * (1 + len(others)), c_int64, c_int64, *(c_void_p,) * len(outs), c_int
        )  # fmt: skip
        function.restype = None
    before, after = ([array.data_ptr() for array in several] for several in ((x, *others), outs))
    function(*before, rows, columns, *after, torch.get_num_threads())
