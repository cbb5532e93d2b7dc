"""Vocabulary operations in C for float32 rows on a CPU, and the noise that they draw with.

The results equal those of `decode.vocab_ops.TorchVocabOps`, up to the rounding of sums. Every sum has one
fixed order, so a row's result is the same alone and in a batch, at any number of threads.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kernels.compilation import kernel
from foredraft.workers import own_threads

# Argument types of the C functions foredraft_<name>, in their order.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "argmax": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "probs": (*(c_void_p,) * 6, *(c_int64,) * 3, c_void_p, c_void_p, c_int),
    "residual": (*(c_void_p,) * 4, c_int64, c_int64, c_void_p),
    "excess": (*(c_void_p,) * 3, c_int64, c_int64, c_void_p),
    "match_prefix": (*(c_void_p,) * 3, c_int64, c_int64, c_void_p, c_void_p),
    "gumbel_argmax": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "max_prob": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "hash_keys": (*(c_void_p,) * 4, *(c_int64,) * 3, c_void_p),
    "uniform": (c_void_p, c_int64, c_void_p),
}
ALLOCATING = ("argmax", "probs", "gumbel_argmax", "max_prob")  # functions that need work memory


class Truncation(Protocol):
    """Temperature and truncation of each row; None where no row uses the parameter."""

    @property
    def temperature(self) -> Tensor: ...  # [B] float32
    @property
    def top_k(self) -> Tensor | None: ...  # [B] int64
    @property
    def max_top_k(self) -> int: ...  # the largest top_k of the batch
    @property
    def top_p(self) -> Tensor | None: ...  # [B] float32
    @property
    def min_p(self) -> Tensor | None: ...  # [B] float32
    @property
    def cut(self) -> Tensor | None: ...  # [B] bool: rows that have a top_p or a min_p


class KernelVocabOps:
    """The C implementation of `decode.vocab_ops.VocabOps`; MemoryError where a kernel gets no work memory."""

    def __init__(self) -> None:
        signatures = SIGNATURES.items()
        self._call = {name: kernel(name, *types, allocates=name in ALLOCATING) for name, types in signatures}

    def _run(self, name: str, *given: Tensor | int | None) -> None:
        """Call a function of the kernels, which reads tensors at their addresses."""
        self._call[name](*(each if isinstance(each, int) else pointer(each) for each in given))

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = _rows(x)
        ids, finite = (x.new_empty(x.shape[:-1], dtype=kind) for kind in (torch.int64, torch.bool))
        self._run("argmax", x, ids.numel(), x.shape[-1], ids, finite, own_threads())
        return ids, finite

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        assert by.temperature.dtype == torch.float32  # the kernel reads the memory as it is
        x = _rows(x)
        batch, columns, size = x.shape
        probs, finite = x.new_empty(x.shape), x.new_empty((batch, columns), dtype=torch.bool)
        options = by.temperature, by.top_k, by.top_p, by.min_p, by.cut
        self._run("probs", x, *options, columns, batch * columns, size, probs, finite, own_threads())
        return probs, finite

    def max_prob(self, x: Tensor) -> Tensor:
        x = _rows(x)
        out = x.new_empty(x.shape[:-1])
        self._run("max_prob", x, out.numel(), x.shape[-1], out, own_threads())
        return out

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        p, q, where = _rows(p), q.contiguous(), where.contiguous()
        out = p.new_empty(p.shape)
        distribution_of, id_of = (None, q) if q.dtype == torch.int64 else (q, None)
        self._run("residual", p, distribution_of, id_of, where, where.numel(), p.shape[-1], out)
        return out

    def excess(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        p, q, weights = _rows(p), _rows(q), _rows(weights)
        out = weights.new_empty(weights.shape, dtype=torch.float64)
        self._run("excess", p, q, weights, weights.numel(), p.shape[-1], out)
        return out

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        drafted, own, lengths = drafted.contiguous(), own.contiguous(), lengths.contiguous()
        found, after = lengths.new_empty(lengths.shape), lengths.new_empty(lengths.shape)
        self._run("match_prefix", drafted, own, lengths, *drafted.shape, found, after)
        return found, after

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        weights, keys = _rows(weights), keys.contiguous()
        out = keys.new_empty(keys.shape)
        self._run("gumbel_argmax", weights, keys, keys.numel(), weights.shape[-1], out, own_threads())
        return out

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        fields = [None if x is None else x.contiguous() for x in (base, rounds, position, attempt)]
        out = position.new_empty(position.shape)
        self._run("hash_keys", *fields, purpose, *position.shape, out)
        return out

    def uniform(self, keys: Tensor) -> Tensor:
        keys = keys.contiguous()
        out = keys.new_empty(keys.shape, dtype=torch.float64)
        self._run("uniform", keys, keys.numel(), out)
        return out


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows; logits of a padded pass are a strided view."""
    assert x.dtype == torch.float32 and x.device.type == "cpu"
    return x.contiguous()


def pointer(x: Tensor | None) -> int | None:
    """Return where a tensor is, for C; None is a null pointer."""
    return None if x is None else x.data_ptr()
