"""Whole stretches of layers in one call: what `Decoder.run` and `Decoder.head` do, by the kernels.

Contract: a column costs what it costs and no padding is computed; whatever shares the pass, a column's bits
are the same, because no sum's order depends on the pass (kernels.c). Weights stay where the decoder has
them; this object holds addresses, and the decoder that owns them.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels.compilation import declare, library
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.rope import Rope
from foredraft.model.runner.job import FusedDraft, SamplingInputs, StopThresholds
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
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("norm", CNorm),
        ("head", CLinear),
        ("layer", ctypes.POINTER(CLayer)),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        ("groups", c_int64),
        *((name, c_void_p) for name in ("first", "count", "start", "row")),
        ("rotary", ctypes.POINTER(c_void_p)),
        ("cache", c_void_p),
        ("rows", c_int64),
        ("positions", c_int64),
    )


DRAWING = ("temperature", "top_k", "top_p", "min_p", "cut")


class CDrawing(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in DRAWING)


class CStops(ctypes.Structure):
    _fields_ = (
        ("bins", c_int64),
        *((name, c_void_p) for name in ("edges", "chances", "keep", "more", "sure")),
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
        self._embedding = decoder.embedding.contiguous()  # whose address the kernels have
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
            self._embedding.data_ptr(),
            decoder.embedding_scale or 0.0,
            _norm(decoder.norm),
            _linear(decoder.output),
            self._layers,
        )
        mixed, width = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._room = spec.hidden_size + max(width, 2 * inner) + max(mixed, inner)  # elements a column
        self._kept = self._embedding.new_empty(0)
        self._rotary: Sequence[int] = ()
        self._tables: Mapping[Rope, Tensor] = {}
        forward, head, draft = (
            getattr(kernels, f"foredraft_{name}{suffix(decoder.dtype)}")
            for name in ("forward", "head", "draft")
        )
        self._forward = declare(
            forward,
            (*(c_void_p,) * 4, c_int64, c_char_p, c_char_p, c_int64, c_int64, c_void_p, c_void_p, c_int),
        )
        self._head = declare(head, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int))
        self._draft = declare(
            draft,
            (
                *(c_void_p,) * 3, c_int64, c_char_p, c_char_p, c_int64, *(c_void_p,) * 2, c_int64,
                *(c_void_p,) * 9, c_int,
            ),
            allocates=True,
        )  # fmt: skip

    def rotate_by(self, tables: Mapping[Rope, Tensor]) -> None:
        """Use these rotary tables, [P, 2, D] each."""
        self._tables = tables  # alive as long as their addresses are used
        self._rotary = [tables[rope].data_ptr() for rope in self.ropes]

    def forward(
        self,
        tokens: Tensor | None,
        hidden: Tensor,
        cache: KVCache,
        columns: Columns,
        plan: Plan,
        start: int,
        stop: int,
        *,
        head: bool = False,
    ) -> Tensor | None:
        """States [N, D] entering layer `start` -> states entering layer `stop`, in place; their keys and
        values go to the cache. tokens [N]: embedded first, into `hidden`. head: gives logits
        [N, V] float32."""
        count = len(hidden)
        pass_ = pass_over(cache, columns, self._rotary)
        room = self._space(count * self._room)
        logits = self._logits(hidden) if head else None
        self._forward(
            ctypes.addressof(self._model),
            ctypes.addressof(pass_),
            None if tokens is None else tokens.data_ptr(),
            hidden.data_ptr(),
            count,
            bytes(plan.attention),
            bytes(plan.mlp),
            start,
            stop,
            room.data_ptr(),
            None if logits is None else logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits

    def draft(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        columns: Columns,
        plan: Plan,
        stop: int,
        most: Sequence[int],
        sampling_inputs: SamplingInputs | None,
        stops: StopThresholds | None,
        rows: int,
    ) -> FusedDraft:
        """Tokens [N] of the columns, then most[g] tokens of each group g's own, one after the other. rows: of
        the batch, whose first the columns' first cache row is. drawing: None for the likeliest."""
        spec, groups, steps = self.decoder.spec, len(columns), max(most)
        pass_ = pass_over(cache, columns, self._rotary)
        given = array("q", (*tokens, *(row for row, _, _ in columns), *most))
        at, _ = given.buffer_info()
        slots = at + 8 * len(tokens)
        room = self._space(len(tokens) * (self._room + spec.hidden_size))
        drawn = torch.zeros(rows, steps, dtype=torch.int64)
        finite = torch.zeros(rows, steps, dtype=torch.bool)
        probs = None if sampling_inputs is None else torch.zeros(rows, steps, spec.vocab_size)
        logits = torch.empty(groups, spec.vocab_size)
        how = CDrawing()
        if sampling_inputs is not None:
            how = CDrawing(*(_address(getattr(sampling_inputs, name)) for name in DRAWING))
        counts, sure, end = array("q", bytes(16 * rows)), None, None
        if stops is not None:
            assert stops.keep.shape == (rows, steps)  # the kernel takes that for granted
            sure = torch.full((rows, steps), -1.0)
            ours = stops.edges, stops.chances, stops.keep, stops.more, sure
            end = CStops(stops.chances.shape[1], *(x.data_ptr() for x in ours))
        self._draft(
            ctypes.addressof(self._model),
            ctypes.addressof(pass_),
            at,
            len(tokens),
            bytes(plan.attention),
            bytes(plan.mlp),
            stop,
            slots,
            slots + 8 * groups,
            steps,
            ctypes.addressof(how),
            None if sampling_inputs is None else sampling_inputs.keys.data_ptr(),
            room.data_ptr(),
            logits.data_ptr(),
            drawn.data_ptr(),
            finite.data_ptr(),
            None if probs is None else probs.data_ptr(),
            None if end is None else ctypes.addressof(end),
            counts.buffer_info()[0],
            torch.get_num_threads(),
        )
        return FusedDraft(drawn, finite, probs, counts[::2].tolist(), counts[1::2].tolist(), sure)

    def _space(self, values: int) -> Tensor:
        """To work in during one call: kept, since the next needs about as much."""
        if len(self._kept) < values:
            self._kept = self._embedding.new_empty(values)
        return self._kept

    def states(self, count: int) -> Tensor:
        """Room for the states of so many columns [N, D]."""
        return self._embedding.new_empty(count, self.decoder.spec.hidden_size)

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(len(hidden), self.decoder.spec.vocab_size, dtype=torch.float32)

    def head(self, hidden: Tensor) -> Tensor:
        """States after the last layer [N, D] -> logits [N, V] float32, the soft-cap included."""
        logits, room = self._logits(hidden), torch.empty_like(hidden)
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
    assert cache.blocked, "the kernels read keys in blocks"
    groups = len(columns)
    rows, starts, counts = zip(*columns, strict=True)
    numbers = array("q", (*accumulate(counts[:-1], initial=0), *counts, *starts, *rows))
    at, _ = numbers.buffer_info()
    pass_ = CPass(
        groups,
        *range(at, at + 32 * groups, 8 * groups),
        (c_void_p * len(rotary))(*rotary),
        cache.memory.data_ptr(),
        cache.rows,
        cache.stored,
    )
    pass_.numbers = numbers  # alive as long as the pass
    return pass_


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _norm(norm: RMSNorm | None) -> CNorm:
    return CNorm(None, 0.0, 0) if norm is None else CNorm(norm.weight.data_ptr(), norm.eps, norm.offset)


def _linear(product: Product) -> CLinear:
    assert isinstance(product, NativeLinear)
    return product.view()
