"""Ranges of layers, the head and fused drafts by the C kernels.

Contract: a pass computes the real columns of a ragged batch and no padding. A column's bits do not depend on
the pass, because the order of no sum does (kernels.c). The weights stay in the decoder; `NativePasses` holds
their addresses, and the decoder, so that these stay valid.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels import pool
from foredraft.kernels.compilation import declare, library
from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.layers import Product, RMSNorm, RowSource
from foredraft.model.rope import Rope
from foredraft.model.runner.job import FusedDraft, SamplingInputs
from foredraft.model.runner.native.codes import NativeCodes
from foredraft.model.runner.native.linear import CLinear, NativeLinear, pointer, suffix

__all__ = ["Groups", "NativePasses"]

MAX_HEAD_DIM = 512  # the head dimension that buffers in kernels.c have room for
Groups = Sequence[tuple[int, int, int]]  # runs of columns: (cache row, first position, number of columns)

# The structures below mirror those of kernels.c, field by field.


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
        ("tied", CLinear),
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


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "cut")


class CSampling(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in SAMPLING)


class CDraft(ctypes.Structure):
    _fields_ = (
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("columns", "steps")),
        *((name, c_void_p) for name in ("slot", "length", "sampling", "keys", "allowed")),
        *((name, c_void_p) for name in ("drawn", "finite", "probs")),
        ("tap", c_int64),
        ("states", c_void_p),
    )


class NativePasses:
    """The passes of one decoder by the C kernels."""

    @classmethod
    def of(cls, decoder: Decoder) -> NativePasses | None:
        """Return the passes of a decoder; None where one of its weights is not packed for the kernels."""
        packed = all(isinstance(product, NativeLinear | NativeCodes) for product in decoder.products)
        return cls(decoder) if packed and decoder.spec.head_dim <= MAX_HEAD_DIM else None

    def __init__(self, decoder: Decoder) -> None:
        spec, kernels = decoder.spec, library()
        assert kernels is not None
        self.decoder = decoder
        self.ropes = list(dict.fromkeys(spec.rope_of(window) for window in spec.windows))
        embedding = decoder.embedding
        self._embedding = embedding.contiguous() if isinstance(embedding, Tensor) else None  # for its address
        self._layers = (CLayer * spec.layers)(*map(self._layer_struct, range(spec.layers)))
        self._model = CModel(
            spec.layers,
            spec.hidden_size,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            spec.activation != "silu",
            spec.attention_scale,
            spec.attention_softcap or 0.0,
            spec.logit_softcap or 0.0,
            pointer(self._embedding),
            CLinear() if isinstance(embedding, Tensor) else _linear_struct(embedding),
            decoder.embedding_scale or 0.0,
            _norm_struct(decoder.norm),
            _linear_struct(decoder.output),
            self._layers,
        )
        inner = spec.intermediate_size
        output, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._scratch_per_column = spec.hidden_size + max(qkv, 2 * inner) + max(output, inner)  # elements
        self._scratch_memory = torch.empty(0, dtype=decoder.dtype)
        self._rotary: Sequence[int] = ()
        self._tables: Mapping[Rope, Tensor] = {}
        forward, head, draft = (
            getattr(kernels, f"foredraft_{name}{suffix(decoder.dtype)}")
            for name in ("forward", "head", "draft")
        )
        self._forward = declare(
            forward,
            (*(c_void_p,) * 4, c_int64, c_char_p, c_char_p, c_int64, c_int64, c_void_p, c_void_p, c_int),
            allocates=True,
        )
        self._head = declare(head, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int))
        self._draft = declare(
            draft,
            (*(c_void_p,) * 3, c_char_p, c_char_p, c_int64, c_void_p, c_void_p, c_int),
            allocates=True,
        )

    def use_rotary_tables(self, tables: Mapping[Rope, Tensor]) -> None:
        """Set the rotary tables of all further passes, [P, 2, D] each."""
        self._tables = tables  # kept alive for their addresses
        self._rotary = [tables[rope].data_ptr() for rope in self.ropes]

    def forward(
        self,
        tokens: Tensor | None,
        hidden: Tensor,
        cache: CacheLayers,
        groups: Groups,
        plan: Plan,
        start: int,
        stop: int,
        *,
        head: bool = False,
    ) -> Tensor | None:
        """Run layers [start, stop) on states, in place, and store their keys and values in the cache.

        Args:
            tokens: Token ids [N] that are embedded into `hidden` first; None: `hidden` holds the states.
            hidden: States entering layer `start`, [N, D]; afterwards those entering layer `stop`.
            cache: The cache, with keys in blocks.
            groups: The rows and positions of the N columns.
            plan: The sub-layers that run.
            start: The first layer.
            stop: The layer after the last.
            head: Compute logits.

        Returns:
            Logits [N, V] in float32 where `head` asks for them, else None.
        """
        count = len(hidden)
        pass_ = pass_struct(cache, groups, self._rotary)
        scratch = self._scratch(count * self._scratch_per_column)
        logits = self._logits(hidden) if head else None
        result = self._forward(
            ctypes.addressof(self._model),
            ctypes.addressof(pass_),
            pointer(tokens),
            hidden.data_ptr(),
            count,
            bytes(plan.attention),
            bytes(plan.mlp),
            start,
            stop,
            scratch.data_ptr(),
            pointer(logits),
            torch.get_num_threads(),
        )
        if result == pool.LATE_THREADS:
            pool.keep(self, self._tables, hidden, cache, scratch)
        return logits

    def draft(
        self,
        cache: CacheLayers,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        lengths: Sequence[int],
        plan: Plan,
        sampling_inputs: SamplingInputs | None,
        allowed: Sequence[Tensor | None] | None,
        tap: int | None,
    ) -> FusedDraft:
        """Run all steps of a draft in one call; see `Runner.draft` for the arguments."""
        rows, steps, vocabulary = len(lengths), max(lengths), self.decoder.spec.vocab_size
        active = [row for row, length in enumerate(lengths) if length]
        read = [token for row in active for token in tokens[row]]
        pass_ = pass_struct(cache, [(row, starts[row], len(tokens[row])) for row in active], self._rotary)
        numbers = array("q", (*read, *active, *(lengths[row] for row in active)))
        address, _ = numbers.buffer_info()
        active_address = address + numbers.itemsize * len(read)
        drawn = torch.zeros(rows, steps, dtype=torch.int64)
        finite = torch.zeros(rows, steps, dtype=torch.bool)
        sampling, keys, probs = CSampling(), None, None
        if sampling_inputs is not None:
            sampling = CSampling(*(pointer(getattr(sampling_inputs, name)) for name in SAMPLING))
            keys, probs = sampling_inputs.keys, torch.zeros(rows, steps, vocabulary)
        states = None
        if tap is not None:
            hidden_size = self.decoder.spec.hidden_size
            states = torch.zeros(rows, steps, hidden_size, dtype=self.decoder.dtype)
        masks = None if allowed is None else (c_void_p * rows)(*map(pointer, allowed))
        draft = CDraft(
            tokens=address,
            columns=len(read),
            steps=steps,
            slot=active_address,
            length=active_address + numbers.itemsize * len(active),
            sampling=ctypes.addressof(sampling),
            keys=pointer(keys),
            allowed=None if masks is None else ctypes.addressof(masks),
            drawn=drawn.data_ptr(),
            finite=finite.data_ptr(),
            probs=pointer(probs),
            tap=tap or 0,
            states=pointer(states),
        )
        scratch = self._scratch(len(read) * (self._scratch_per_column + self.decoder.spec.hidden_size))
        logits = torch.empty(len(active), vocabulary)
        result = self._draft(
            ctypes.addressof(self._model),
            ctypes.addressof(pass_),
            ctypes.addressof(draft),
            bytes(plan.attention),
            bytes(plan.mlp),
            self.decoder.spec.layers,
            scratch.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if result == pool.LATE_THREADS:
            pool.keep(self, self._tables, cache, scratch)
        return FusedDraft(drawn, finite, probs, states)

    def _scratch(self, values: int) -> Tensor:
        """Return work memory of at least `values` elements, which the next call can use again."""
        if len(self._scratch_memory) < values:
            self._scratch_memory = torch.empty(values, dtype=self.decoder.dtype)
        return self._scratch_memory

    def new_states(self, count: int) -> Tensor:
        """Return an uninitialised tensor for the states of `count` columns, [N, D]."""
        return torch.empty(count, self.decoder.spec.hidden_size, dtype=self.decoder.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(len(hidden), self.decoder.spec.vocab_size, dtype=torch.float32)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] in float32, soft-capped, of states [N, D] after the last layer."""
        logits, scratch = self._logits(hidden), torch.empty_like(hidden)
        self._head(
            ctypes.addressof(self._model),
            hidden.data_ptr(),
            len(hidden),
            logits.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return logits

    def _layer_struct(self, index: int) -> CLayer:
        layer, spec = self.decoder.layers[index], self.decoder.spec
        attention, mlp, window = layer.attention, layer.mlp, spec.windows[index]
        norms = [attention.norm, attention.post_norm, attention.q_norm, attention.k_norm]
        norms += [None, None] if mlp is None else [mlp.norm, mlp.post_norm]
        made = CLayer(window=window or 0, rope=self.ropes.index(spec.rope_of(window)))
        for name, norm in zip(NORMS, norms, strict=True):
            setattr(made, name, _norm_struct(norm))
        for name, product in zip(PRODUCTS, layer.products, strict=False):  # an adapter may have no MLP
            setattr(made, name, _linear_struct(product))
        return made


def pass_struct(cache: CacheLayers, groups: Groups, rotary: Sequence[int]) -> CPass:
    """Return the C struct of a pass.

    Args:
        cache: The cache, with keys in blocks.
        groups: The rows and positions of the columns, in the order of the columns.
        rotary: The addresses of the rotary tables.
    """
    assert cache.blocked, "the kernels read keys in blocks"
    rows, starts, counts = zip(*groups, strict=True)
    numbers = array("q", (*accumulate(counts[:-1], initial=0), *counts, *starts, *rows))
    address, _ = numbers.buffer_info()
    size = numbers.itemsize * len(groups)  # bytes of each of the four arrays
    pass_ = CPass(
        len(groups),
        *range(address, address + 4 * size, size),
        (c_void_p * len(rotary))(*rotary),
        cache.pointers,
        cache.rows,
        cache.stored,
    )
    pass_.numbers = numbers  # kept alive for their addresses
    return pass_


def _norm_struct(norm: RMSNorm | None) -> CNorm:
    return CNorm(None, 0.0, 0) if norm is None else CNorm(norm.weight.data_ptr(), norm.eps, norm.offset)


def _linear_struct(product: Product | RowSource) -> CLinear:
    assert isinstance(product, NativeLinear | NativeCodes)
    return product.as_struct()
