"""Whole stretches of layers in one call: what `Decoder.run` and `Decoder.head` do, by the kernels.

Contract: a column costs what it costs and no padding is computed; whatever shares the pass, a column's bits
are the same, because no sum's order depends on the pass (kernels.c). Weights stay where the decoder has
them; this object holds addresses, and the decoder that owns them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels.loading import library
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.rope import Rope
from foredraft.model.runner.native.linear import CLinear, NativeLinear, suffix

__all__ = ["Columns", "NativePasses"]

WIDEST_HEAD = 512  # channels of a head, as kernels.c has room for
Columns = Sequence[tuple[int, int, int]]  # (cache row, first position, how many)


class CNorm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float), ("offset", c_int32))


NORMS = ("before", "after", "q", "k", "mlp_before", "mlp_after")
PRODUCTS = ("qkv", "output", "gate_up", "down")


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CNorm) for name in NORMS),
        *((name, CLinear) for name in PRODUCTS),
        ("window", c_int64),
        ("rope", c_int64),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "gelu")),
        *((name, c_float) for name in ("scale", "softcap", "logit_softcap")),
        ("norm", CNorm),
        ("head", CLinear),
        ("layer", ctypes.POINTER(CLayer)),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        ("groups", c_int64),
        *((name, ctypes.POINTER(c_int64)) for name in ("first", "count", "start", "row")),
        ("rotary", ctypes.POINTER(c_void_p)),
        ("cache", c_void_p),
        ("rows", c_int64),
        ("positions", c_int64),
    )


class NativePasses:
    """The passes of one decoder."""

    @classmethod
    def of(cls, decoder: Decoder) -> NativePasses | None:
        """None where one of its products, or a head, is not for the kernels."""
        products = [decoder.output]
        for layer in decoder.layers:
            attention, mlp = layer.attention, layer.mlp
            products += [attention.qkv, attention.output, mlp.gate_up, mlp.down]
        arranged = all(isinstance(product, NativeLinear) for product in products)
        return cls(decoder) if arranged and decoder.spec.head_dim <= WIDEST_HEAD else None

    def __init__(self, decoder: Decoder) -> None:
        spec, kernels = decoder.spec, library()
        assert kernels is not None
        self.decoder = decoder
        self.ropes = list(dict.fromkeys(spec.rope_of(window) for window in spec.windows))
        inner = decoder.layers[0].mlp.down.shape[1]
        self._layers = (CLayer * spec.layers)(*map(self._layer, range(spec.layers)))
        self._model = CModel(
            spec.layers,
            spec.hidden_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            inner,
            spec.activation != "silu",
            spec.attention_scale,
            spec.attention_softcap or 0.0,
            spec.logit_softcap or 0.0,
            _norm(decoder.norm),
            _linear(decoder.output),
            self._layers,
        )
        mixed, width = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._room = spec.hidden_size + max(width, 2 * inner) + max(mixed, inner)  # elements a column
        self._run = getattr(kernels, "foredraft_run" + suffix(decoder.dtype))
        self._run.argtypes = (
            c_void_p, c_void_p, c_void_p, c_int64, c_char_p, c_char_p, c_int64, c_int64, c_void_p, c_int,
        )  # fmt: skip
        self._head = getattr(kernels, "foredraft_head" + suffix(decoder.dtype))
        self._head.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int)
        self._run.restype = self._head.restype = None

    def run(
        self,
        hidden: Tensor,
        cache: KVCache,
        tables: Mapping[Rope, Tensor],
        columns: Columns,
        plan: Plan,
        start: int,
        stop: int,
    ) -> None:
        """States [N, D] entering layer `start` -> states entering layer `stop`, in place; their keys and
        values go to the cache. tables: rotary, [P, 2, D]."""
        count = len(hidden)
        pass_ = pass_over(cache, columns, [tables[rope].data_ptr() for rope in self.ropes])
        room = hidden.new_empty(count * self._room)
        self._run(
            ctypes.addressof(self._model),
            ctypes.addressof(pass_),
            hidden.data_ptr(),
            count,
            bytes(plan.attention),
            bytes(plan.mlp),
            start,
            stop,
            room.data_ptr(),
            torch.get_num_threads(),
        )

    def head(self, hidden: Tensor) -> Tensor:
        """States after the last layer [N, D] -> logits [N, V] float32, the soft-cap included."""
        logits = hidden.new_empty(len(hidden), self.decoder.spec.vocab_size, dtype=torch.float32)
        room = torch.empty_like(hidden)
        self._head(
            ctypes.addressof(self._model),
            hidden.data_ptr(),
            len(hidden),
            logits.data_ptr(),
            room.data_ptr(),
            torch.get_num_threads(),
        )
        return logits

    def _layer(self, index: int) -> CLayer:
        layer, spec = self.decoder.layers[index], self.decoder.spec
        attention, mlp, window = layer.attention, layer.mlp, spec.windows[index]
        norms = (
            attention.norm,
            attention.post_norm,
            attention.q_norm,
            attention.k_norm,
            mlp.norm,
            mlp.post_norm,
        )
        products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        rope = self.ropes.index(spec.rope_of(window))
        return CLayer(*map(_norm, norms), *map(_linear, products), window or 0, rope)


def pass_over(cache: KVCache, columns: Columns, rotary: Sequence[int]) -> CPass:
    """The pass of these columns, one after the other; rotary: the addresses of the tables."""
    groups = len(columns)
    numbers = c_int64 * groups
    rows, starts, counts = zip(*columns, strict=True)
    firsts = accumulate(counts[:-1], initial=0)
    return CPass(
        groups,
        numbers(*firsts),
        numbers(*counts),
        numbers(*starts),
        numbers(*rows),
        (c_void_p * len(rotary))(*rotary),
        cache.memory.data_ptr(),
        cache.rows,
        cache.stored,
    )


def _norm(norm: RMSNorm | None) -> CNorm:
    return CNorm(None, 0.0, 0) if norm is None else CNorm(norm.weight.data_ptr(), norm.eps, norm.offset)


def _linear(product: Product) -> CLinear:
    assert isinstance(product, NativeLinear)
    return product.view()
