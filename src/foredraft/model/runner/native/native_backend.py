"""The back end of the project's own C kernels: passes, the head and fused drafts.

A pass computes the real columns of a ragged batch and no padding, and a column's bits do not depend on the
pass, because the order of no sum does (kernels.c). The decoder holds the weights; the back end holds it and
their addresses.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels import pool
from foredraft.kernels.compilation import kernel, level_in_use
from foredraft.kernels.vocab import pointer
from foredraft.model.attention import at_columns
from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Attention, Decoder
from foredraft.model.layers import LayerInputs, PairInputs, Product
from foredraft.model.memory import upload
from foredraft.model.recurrent import Recurrence, block_of
from foredraft.model.rope import Rope
from foredraft.model.runner.native.products import CLinear, NativeCodes, is_native, room_of, suffix
from foredraft.model.runner.native.structs import (
    ACTIVATIONS,
    KINDS,
    MAX_HEAD_DIM,
    MIXER_PARTS,
    NORMS,
    PRODUCTS,
    SAMPLING,
    CDraft,
    CLayer,
    CMixer,
    CModel,
    CRecurrent,
    CSampling,
    Groups,
    linear_struct_of,
    norm_struct,
    pass_struct,
    recurrent_structs,
)
from foredraft.model.runner.passes import MAX_QUERIES, DraftInputs, Forward, FusedDraft, Pass
from foredraft.model.spec import Plan
from foredraft.workers import own_threads

POINTER, TWO, THREE = c_void_p, (c_void_p,) * 2, (c_void_p,) * 3
PLAN = (c_char_p, c_char_p)
# argument types of the C functions foredraft_<name>, in their order, and whether they need work memory
SIGNATURES: dict[str, tuple[tuple[type, ...], bool]] = {
    "forward": ((*TWO, *TWO, c_int64, *PLAN, c_int64, c_int64, POINTER, c_int64, *THREE, c_int), True),
    "inputs": ((*THREE, c_int64, *TWO, c_int), True),
    "head": ((*TWO, c_int64, *TWO, c_int), False),
    "norms": ((*THREE, c_int64, c_int64), False),
    "draft": ((*THREE, *PLAN, c_int64, *TWO, c_int), True),
}


@dataclass(frozen=True, slots=True)
class PairDraft:
    """What a fused draft of a head takes and gives besides."""

    states: Tensor  # the states of the pairs that the first step reads, [N, D], row by row
    left: Tensor  # output: the state of the pair that would follow each row's draft, [B, D]


class NativeBackend:
    native = True
    fuses = True
    takes_leaves = True
    shapes, max_queries = None, MAX_QUERIES  # any, because no sum has another order at another shape

    @classmethod
    def of(cls, decoder: Decoder, pairs: PairInputs | None = None) -> NativeBackend | None:
        """Return the back end of a decoder; None where one of its weights is not packed for the kernels."""
        join = [] if pairs is None or pairs.join is None else [pairs.join]
        packed = all(map(is_native, [*decoder.products, *join]))
        widest = max(map(decoder.spec.head_dim_of, decoder.spec.windows))
        return cls(decoder, pairs) if packed and widest <= MAX_HEAD_DIM else None

    def __init__(self, decoder: Decoder, pairs: PairInputs | None = None) -> None:
        spec = decoder.spec
        assert spec.residual_scale is None or not spec.post_norms, "the kernels scale a sum without a norm"
        self.decoder = decoder
        self._recurrent: tuple[CacheLayers, ctypes.Array[CRecurrent]] | None = (
            None  # of the last pass's cache
        )
        self.ropes = list(spec.ropes)
        embedding, self._taps = decoder.embedding, list[Tensor]()
        self._embedding = embedding.contiguous() if isinstance(embedding, Tensor) else None  # for its address
        self._layers = (CLayer * spec.layers)(*map(self._layer_struct, range(spec.layers)))
        heads = [spec.heads * spec.head_dim_of(window) for window in spec.windows]
        heads += [] if spec.recurrent is None else [spec.recurrent.values]
        inner = [spec.inner_of(layer) for layer in range(spec.layers)]
        qkv = [sum(product.shape[0] for product in layer.attention.products[:-1]) for layer in decoder.layers]
        wide = max(*qkv, *(2 * size for size in inner), spec.layer_input_size)
        narrow = max(*heads, *inner, spec.layer_input_size)
        pairs_read = 0 if pairs is None else 2 * spec.hidden_size
        widest = max(spec.hidden_size, pairs_read, *heads, *inner, spec.layer_input_size)
        room = room_of(widest, decoder.dtype)
        learned = decoder.learned_positions
        norm = decoder.norm if pairs is None or pairs.final_norm else None
        self._model = CModel(
            spec.layers, spec.hidden_size, spec.heads,
            ACTIVATIONS[spec.activation], spec.gated, spec.parallel_residual,
            spec.projection_norms, spec.sum_norms, wide, spec.gated_attention, room,
            spec.attention_scale, spec.attention_softcap or 0.0, spec.logit_softcap or 0.0,
            pointer(self._embedding),
            CLinear() if isinstance(embedding, Tensor) else linear_struct_of(embedding),
            decoder.embedding_scale or 0.0,
            pointer(learned), 0 if learned is None else len(learned) - 1,
            norm_struct(norm), linear_struct_of(decoder.output, spec.logit_scale),
            self._layers,
        )  # fmt: skip
        self._inputs = 0  # elements of the layers' inputs of a column
        if decoder.inputs is not None:
            self._add_inputs(decoder.inputs)
        self._scratch_per_column = room + spec.hidden_size + wide + narrow  # elements
        self._pairs = pairs
        if pairs is not None:
            self._add_pairs(pairs)
        self._scratch_memory = torch.empty(0, dtype=decoder.dtype)
        self._rotary: Sequence[int] = ()
        self._tables: Mapping[Rope, Tensor] = {}
        self._forward, self._make_inputs, self._head, self._norms, self._draft = (
            kernel(name + suffix(decoder.dtype), *types, allocates=allocates)
            for name, (types, allocates) in SIGNATURES.items()
        )

    @property
    def choices(self) -> list[str]:
        head = self.decoder.output
        few = [f"a head of {head.code_format.bits} bits"] if isinstance(head, NativeCodes) else []
        return [f"C kernels of {level_in_use()}, batch-invariant at any shape", *few]

    def uncaptured(self) -> AbstractContextManager[None]:
        return nullcontext()

    def use_rotary_tables(self, tables: Mapping[Rope, Tensor]) -> None:
        self._tables = tables  # kept alive for their addresses
        self._rotary = [tables[rope].data_ptr() for rope in self.ropes]

    def run(self, pass_: Pass) -> Forward:
        batch, width = pass_.tokens.shape
        pass_.check(width)
        groups = _groups(pass_)
        count = sum(columns for _, _, columns, _ in groups)
        indices = None if count == batch * width else pass_.real_columns(width)
        real = None if indices is None else upload(indices, pass_.tokens.device)

        def asked(computed: Tensor) -> Tensor:
            """[N, ...] -> [B, T, ...]"""
            return at_columns(computed, real, batch * width).view(batch, width, -1)

        tokens: Tensor | None = None
        if pass_.hidden is None or self._inputs:
            flat = pass_.tokens.flatten().contiguous()
            tokens = flat if real is None else flat[real]
        inputs = self._layer_inputs(tokens) if self._inputs and tokens is not None else None
        if pass_.hidden is None:
            x = torch.empty(count, self.decoder.spec.hidden_size, dtype=self.decoder.dtype)
        else:
            tokens = None
            x = pass_.hidden.reshape(batch * width, -1)  # [B * T, D]
            x = x.clone() if real is None else x[real]
        moved = {run.row: run.base for run in pass_.runs(width, ragged=True)}
        depths = sorted(depth for depth in pass_.aux_layers if depth < pass_.stop)
        logits, states = self.forward(
            tokens, x, pass_.cache, groups, (pass_.plan, pass_.start, pass_.stop),
            head=pass_.head and pass_.at is None, inputs=inputs, aux_layers=depths,
            bases=[moved.get(row, 0) for row, *_ in groups],
        )  # fmt: skip
        aux_states = {depth: asked(own) for depth, own in zip(depths, states, strict=True)}
        if pass_.stop in pass_.aux_layers:
            aux_states[pass_.stop] = asked(x.clone())
        out = asked(x)
        if logits is not None:
            logits = asked(logits)
        elif pass_.head:
            logits = self.head(out[torch.arange(batch), pass_.at])[:, None]
        return Forward(logits, out, aux_states)

    def forward(
        self,
        tokens: Tensor | None,
        hidden: Tensor,
        cache: CacheLayers,
        groups: Groups,
        layers: tuple[Plan, int, int],  # the sub-layers, the first layer and the one after the last
        *,
        head: bool = False,
        inputs: Tensor | None = None,
        aux_layers: Sequence[int] = (),
        bases: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor]:
        """Run layers on `hidden` [N, D], in place, and store keys and values in the cache."""
        count, (plan, start, stop) = len(hidden), layers
        if self._pairs is not None:
            inputs = torch.empty_like(hidden)  # the embeddings
        pass_ = pass_struct(cache, groups, self._rotary, pointer(inputs), bases, self._rows_of(cache))
        scratch = self._scratch(count * self._scratch_per_column)
        logits = self._logits(hidden) if head else None
        states = hidden.new_empty(len(aux_layers), *hidden.shape)
        given = pointer(tokens), hidden.data_ptr(), count
        run = bytes(plan.attention), bytes(plan.mlp), start, stop
        read = (c_int64 * len(aux_layers))(*aux_layers), len(aux_layers), pointer(states)
        ends = scratch.data_ptr(), pointer(logits), own_threads()
        addresses = ctypes.addressof(self._model), ctypes.addressof(pass_)
        result = self._forward(*addresses, *given, *run, *read, *ends)
        if result == pool.LATE_THREADS:
            pool.keep(self, self._tables, hidden, cache, scratch, inputs)
        return logits, states

    def _rows_of(self, cache: CacheLayers) -> ctypes.Array[CRecurrent] | None:
        if cache.recurrent is None:
            return None
        if self._recurrent is None or self._recurrent[0] is not cache:
            self._recurrent = cache, recurrent_structs(self.decoder.spec, cache.recurrent)
        return self._recurrent[1]

    def _layer_inputs(self, tokens: Tensor) -> Tensor:
        count, hidden = len(tokens), self.decoder.spec.hidden_size
        inputs, embedded = (torch.empty(count, n, dtype=self.decoder.dtype) for n in (self._inputs, hidden))
        scratch = self._scratch(count * (self._model.room + hidden + self._inputs))
        ends = inputs.data_ptr(), scratch.data_ptr(), own_threads()
        given = tokens.data_ptr(), embedded.data_ptr(), count
        result = self._make_inputs(ctypes.addressof(self._model), *given, *ends)
        if result == pool.LATE_THREADS:
            pool.keep(self, inputs, scratch)
        return inputs

    def _add_inputs(self, inputs: LayerInputs) -> None:
        model, self._table = self._model, inputs.table.contiguous()  # kept for its address
        model.input_size, model.input_layers, model.inputs = inputs.size, inputs.layers, pointer(self._table)
        model.input_scale, model.projection_scale = inputs.scale, inputs.projection_scale
        model.projection, model.input_norm = linear_struct_of(inputs.projection), norm_struct(inputs.norm)
        self._inputs = inputs.size * inputs.layers

    def _add_pairs(self, pairs: PairInputs) -> None:
        model, hidden = self._model, self.decoder.spec.hidden_size
        model.pairs, model.residual, model.recurs = True, pairs.normed_residual, pairs.normed_output
        model.token_norm, model.state_norm = norm_struct(pairs.token_norm), norm_struct(pairs.state_norm)
        if pairs.join is not None:
            model.join = linear_struct_of(pairs.join)
        self._scratch_per_column += hidden

    def draft(
        self,
        cache: CacheLayers,
        inputs: DraftInputs,
        plan: Plan,
        exit: int | None,
        pairs: PairDraft | None = None,
    ) -> FusedDraft:
        rows, steps, active = len(inputs.lengths), max(inputs.lengths), inputs.active
        vocab, hidden_size = inputs.draft_vocab, self.decoder.spec.hidden_size
        vocabulary = self.decoder.spec.vocab_size if vocab is None else vocab.vocabulary
        read = [token for row in active for token in inputs.tokens[row]]
        starts, tokens = inputs.starts, inputs.tokens
        groups = [(row, starts[row], len(tokens[row]), starts[row]) for row in active]
        counts = {row: len(tokens[row]) + inputs.lengths[row] - 1 for row in active}
        own = cache.recurring(plan, 0, self.decoder.spec.layers)
        bases = [cache.begin(row, starts[row], counts[row], own) if own else 0 for row in active]
        pass_ = pass_struct(cache, groups, self._rotary, None, bases, self._rows_of(cache))
        drawn, finite = (torch.zeros(rows, steps, dtype=kind) for kind in (torch.int64, torch.bool))
        most, sampling, keys, probs, states = max(inputs.choices, default=0), CSampling(), None, None, None
        further = torch.full((rows, steps, most), -1) if most else None
        if inputs.sampling is not None:
            sampling = CSampling(*(pointer(getattr(inputs.sampling, name)) for name in SAMPLING))
            keys, probs = inputs.sampling.keys, torch.zeros(rows, steps, vocabulary)
        if exit is not None:
            states = torch.zeros(rows, steps, hidden_size, dtype=self.decoder.dtype)
        masks = None if inputs.allowed is None else (c_void_p * rows)(*map(pointer, inputs.allowed))
        numbers = _draft_numbers(inputs, read, steps)
        draft = CDraft(
            columns=len(read), steps=steps, sampling=ctypes.addressof(sampling), keys=pointer(keys),
            allowed=None if masks is None else ctypes.addressof(masks),
            drawn=drawn.data_ptr(), finite=finite.data_ptr(), probs=pointer(probs),
            exit_layer=exit or 0, states=pointer(states),
            draft_vocab=None if vocab is None else vocab.tokens.data_ptr(), vocabulary=vocabulary,
            most=most, further=pointer(further),
        )  # fmt: skip
        address, size = numbers.buffer_info()[0], numbers.itemsize
        places = accumulate((len(read), len(active), len(active)), initial=0)
        draft.tokens, draft.slot, draft.length, draft.choices = (address + size * place for place in places)
        per_column = self._scratch_per_column + hidden_size + 2 * self._inputs
        logits = torch.empty(len(active) * self.decoder.output.shape[0] + vocabulary)
        if pairs is not None:
            assert len(pairs.states) == len(read)
            draft.pairs, draft.left = pairs.states.data_ptr(), pairs.left.data_ptr()
            per_column += hidden_size
        scratch = self._scratch(len(read) * per_column)
        layers = bytes(plan.attention), bytes(plan.mlp), self.decoder.spec.layers
        ends = scratch.data_ptr(), logits.data_ptr(), own_threads()
        result = self._draft(*map(ctypes.addressof, (self._model, pass_, draft)), *layers, *ends)
        if result == pool.LATE_THREADS:
            pool.keep(self, self._tables, cache, scratch)
        return FusedDraft(drawn, finite, probs, states, further=further)

    def _scratch(self, values: int) -> Tensor:
        """Return work memory of at least `values` elements, which the next call can use again."""
        if len(self._scratch_memory) < values:
            self._scratch_memory = torch.empty(values, dtype=self.decoder.dtype)
        return self._scratch_memory

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(len(hidden), self.decoder.output.shape[0], dtype=torch.float32)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self._logits(hidden)
        scratch = hidden.new_empty(len(hidden), self._model.room + hidden.shape[1])
        ends = logits.data_ptr(), scratch.data_ptr(), own_threads()
        self._head(ctypes.addressof(self._model), hidden.data_ptr(), len(hidden), *ends)
        return logits

    def normed(self, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        norm = ctypes.addressof(self._model) + CModel.norm.offset
        self._norms(norm, hidden.data_ptr(), out.data_ptr(), *hidden.shape)
        return out

    def _layer_struct(self, index: int) -> CLayer:
        layer, spec = self.decoder.layers[index], self.decoder.spec
        attention, mlp, window, own = layer.attention, layer.mlp, spec.windows[index], layer.input
        norms = [attention.norm, attention.post_norm, None, None, None]
        if isinstance(attention, Attention):
            norms[2:] = [attention.q_norm, attention.k_norm, attention.v_norm]
        norms += [None, None] if mlp is None else [mlp.norm, mlp.post_norm]
        norms.append(None if own is None else own.norm)
        products: list[Product | None] = [attention.qkv, attention.output]
        products += [None, None] if mlp is None else [mlp.gate_up, mlp.down]  # an adapter may have none
        products += [None, None] if own is None else [own.gate, own.output]
        rope = spec.rope_of(window)
        made = CLayer(
            window=window or 0,
            rope=self.ropes.index(rope),
            query_rope=self.ropes.index(spec.query_rope or rope),
            rotated=0 if index in spec.unrotated else rope.rotated(spec.head_dim_of(window)),
            kv_heads=spec.kv_heads_of(window),
            dim=spec.head_dim_of(window),
            inner=spec.inner_of(index),
            reads=not spec.stores(index),
            joined=spec.joins_values(window),
            scalar=float(layer.scalar),
        )
        if isinstance(attention, Recurrence):
            made.mixer = self._mixer_struct(attention)
        for name, norm in zip(NORMS, norms, strict=True):
            setattr(made, name, norm_struct(norm))
        for name, product in zip(PRODUCTS, products, strict=True):
            adds = name in ("output", "down")
            if product is not None:
                setattr(made, name, linear_struct_of(product, spec.residual_scale if adds else None))
        return made

    def _mixer_struct(self, weights: Recurrence) -> CMixer:
        sizes, taps = weights.sizes, weights.taps.T.contiguous()
        self._taps.append(taps)  # kept for its address
        return CMixer(
            CLinear() if weights.rates is None else linear_struct_of(weights.rates), taps.data_ptr(),
            *(pointer(getattr(weights, name, None)) for name in MIXER_PARTS), KINDS[sizes.kind],
            sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.taps, block_of(sizes),
            sizes.rates, getattr(weights, "eps", 0.0),
        )  # fmt: skip


def _groups(pass_: Pass) -> Groups:
    groups = list[tuple[int, int, int, int]]()
    for b, (start, columns) in enumerate(zip(pass_.starts, pass_.real, strict=True)):
        row, first = pass_.first_row + b, start + columns.start
        if columns:
            groups.append((row, first, len(columns), first))
        groups += [(row, start + place, 1, start + column) for column, place in pass_.leaves_of(b).items()]
    return groups


def _draft_numbers(inputs: DraftInputs, read: list[int], steps: int) -> array[int]:
    """Return what a fused draft reads: tokens; of rows that draft their places and lengths; choices."""
    active, missing = inputs.active, steps - len(inputs.choices)
    lengths = (inputs.lengths[row] for row in active)
    return array("q", (*read, *active, *lengths, *inputs.choices, *(0,) * missing))
