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

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = _rows(x)
        shape, columns = x.shape[:-1], x.shape[-1]
        ids, finite = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.bool)
        outs = ids.data_ptr(), finite.data_ptr()
        self._call["argmax"](x.data_ptr(), ids.numel(), columns, *outs, own_threads())
        return ids, finite

    def probs(self, x: Tensor, by: Truncation) -> tuple[Tensor, Tensor]:
        assert by.temperature.dtype == torch.float32  # the kernel reads the memory as it is
        x = _rows(x)
        batch, columns, size = x.shape
        probs, finite = x.new_empty(x.shape), x.new_empty((batch, columns), dtype=torch.bool)
        options = map(pointer, (by.temperature, by.top_k, by.top_p, by.min_p, by.cut))
        outs = probs.data_ptr(), finite.data_ptr()
        self._call["probs"](x.data_ptr(), *options, columns, batch * columns, size, *outs, own_threads())
        return probs, finite

    def max_prob(self, x: Tensor) -> Tensor:
        x = _rows(x)
        out = x.new_empty(x.shape[:-1])
        self._call["max_prob"](x.data_ptr(), out.numel(), x.shape[-1], out.data_ptr(), own_threads())
        return out

    def residual(self, p: Tensor, q: Tensor, where: Tensor) -> Tensor:
        p, q, where = _rows(p), q.contiguous(), where.contiguous()
        out = p.new_empty(p.shape)
        one_hot = q.dtype == torch.int64
        distribution_of, id_of = (None, q.data_ptr()) if one_hot else (q.data_ptr(), None)
        size = where.numel(), p.shape[-1]
        self._call["residual"](p.data_ptr(), distribution_of, id_of, where.data_ptr(), *size, out.data_ptr())
        return out

    def excess(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        p, q, weights = _rows(p), _rows(q), _rows(weights)
        out = weights.new_empty(weights.shape, dtype=torch.float64)
        size = weights.numel(), p.shape[-1]
        self._call["excess"](p.data_ptr(), q.data_ptr(), weights.data_ptr(), *size, out.data_ptr())
        return out

    def match_prefix(self, drafted: Tensor, own: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        drafted, own, lengths = drafted.contiguous(), own.contiguous(), lengths.contiguous()
        found, after = lengths.new_empty(lengths.shape), lengths.new_empty(lengths.shape)
        outs = found.data_ptr(), after.data_ptr()
        self._call["match_prefix"](
            drafted.data_ptr(), own.data_ptr(), lengths.data_ptr(), *drafted.shape, *outs
        )
        return found, after

    def gumbel_argmax(self, weights: Tensor, keys: Tensor) -> Tensor:
        weights, keys = _rows(weights), keys.contiguous()
        out = keys.new_empty(keys.shape)
        size = keys.numel(), weights.shape[-1]
        self._call["gumbel_argmax"](weights.data_ptr(), keys.data_ptr(), *size, out.data_ptr(), own_threads())
        return out

    def hash_keys(
        self, base: Tensor, rounds: Tensor | None, position: Tensor, attempt: Tensor | None, purpose: int
    ) -> Tensor:
        fields = [None if x is None else x.contiguous() for x in (base, rounds, position, attempt)]
        out = position.new_empty(position.shape)
        self._call["hash_keys"](*map(pointer, fields), purpose, *position.shape, out.data_ptr())
        return out

    def uniform(self, keys: Tensor) -> Tensor:
        keys = keys.contiguous()
        out = keys.new_empty(keys.shape, dtype=torch.float64)
        self._call["uniform"](keys.data_ptr(), keys.numel(), out.data_ptr())
        return out


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows; logits of a padded pass are a strided view."""
    assert x.dtype == torch.float32 and x.device.type == "cpu"
    return x.contiguous()


def pointer(x: Tensor | None) -> int | None:
    """Return where a tensor is, for C; None is a null pointer."""
    return None if x is None else x.data_ptr()
