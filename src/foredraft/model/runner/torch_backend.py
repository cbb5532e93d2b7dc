"""The back end of PyTorch's operators: passes at batch-invariant shapes, ragged, or replayed as CUDA graphs;
drafts.

It is the draft of the single steps, by the same noise. Every row takes as many steps as the longest draft;
what it computes past its own is no part of the result. The host reads no device value.

A ragged pass gathers the real columns of a batch, where the rows that it saves are worth more than the moves
in each layer. Attention still sees the query bucket of every row, so a real column has the bits of the padded
pass. `_compute` is a function of a `PassShape` and of `PassInputs` alone, so a pass can be captured once per
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import PassInputs, PassShape, at_columns, build_context
from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Decoder, RunLayers
from foredraft.model.memory import upload
from foredraft.model.rope import Rope
from foredraft.model.runner.compiled import compiled_parts, unpacked_because
from foredraft.model.runner.graphs import CudaGraphCapturer, Graphs, coarse_length
from foredraft.model.runner.invariant_shapes import ANY_SHAPE, InvariantShapes, find_shapes
from foredraft.model.runner.passes import (
    CHUNK,
    MAX_QUERIES,
    DraftInputs,
    DraftSampler,
    DrawnToken,
    Forward,
    FusedDraft,
    Pass,
)
from foredraft.model.spec import ModelSpec, Plan

FIRST: Final = 2  # columns of the first step: after a draft that was accepted whole, it reads two tokens
# Bytes of a sampled draft's distributions, which a graph keeps; to compute larger ones takes long anyway.
MOST_BYTES: Final = 2**23


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The key of all drafts that run the same operators on the same shapes."""

    first: PassShape  # the shape of the first step
    later: PassShape  # the shape of the others, of one column
    steps: int  # K


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The values in which drafts of one shape differ."""

    tokens: Tensor  # the tokens that each row reads first, [B, T] int64, padded on the right
    starts: Tensor  # the position of the first, [B] int64
    last: Tensor  # the column of the last, [B] int64
    lengths: Tensor  # the tokens that each row drafts, [B] int64
    draws: DraftSampler  # draws the tokens


def draft_steps(
    compute: Callable[[PassShape, PassInputs], Forward], shape: DraftShape, inputs: StepInputs
) -> FusedDraft:
    tokens, starts = inputs.tokens, inputs.starts
    rows = torch.arange(len(tokens), device=tokens.device)
    at: Tensor | None = inputs.last
    drawn, states = list[DrawnToken](), list[Tensor]()
    drafted = tokens[:, :0]  # [B, j]
    for step in range(shape.steps):
        forward = compute(shape.later if step else shape.first, PassInputs(starts, tokens, at=at))
        assert forward.logits is not None
        states += [own if at is None else own[rows, at][:, None] for own in forward.aux_states.values()]
        starts = starts + (1 if at is None else at + 1)
        at = None
        drawn.append(inputs.draws(forward.logits, drafted))
        tokens = drawn[-1].token
        drafted = torch.cat([drafted, tokens], 1)
    wanted = torch.arange(shape.steps, device=tokens.device) < inputs.lengths[:, None]  # [B, K]
    finite = torch.cat([each.drawable for each in drawn], 1) & wanted
    entering = torch.cat(states, 1).where(wanted[..., None], 0.0) if states else None
    return FusedDraft(drafted * wanted, finite, probs=None, states=entering, drawn=tuple(drawn))


@dataclass(frozen=True, slots=True)
class RaggedRule:
    free_rows: int  # products of up to so many rows cost about the same
    min_saved: int  # the rows beyond `free_rows` that a ragged pass must save

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> RaggedRule:
        free_rows, moves = COSTS[device.type]
        heads = 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        weights = spec.hidden_size * (heads + 3 * spec.intermediate_size)  # of the products of a layer
        return cls(free_rows, moves // weights + 1)

    def pays(self, padded: int, real: int) -> bool:
        return padded - max(real, self.free_rows) >= self.min_saved

    def __str__(self) -> str:
        return f"ragged passes where they save {self.min_saved} rows beyond {self.free_rows}"


# By device: the free rows, and the cost of a layer's moves in multiply-adds of its products. CPU: timed on
# one core with bfloat16 dot products, where the moves take 14 µs and a multiply-add 4 ps; doubled, because
# products use all cores and moves do not. CUDA: computed, not timed: three launches of 5 µs on a device of
# 350e12 multiply-adds per second that is bound by memory below some 256 rows.
COSTS = {"cpu": (8, 2**23), "cuda": (256, 2**32)}


PREFILL_BUCKETS = (8, 16, 32, 64, 128, CHUNK)  # columns that a prefill pass is padded to


class TorchBackend:
    native = False
    takes_leaves = False  # with a tree mask, a leaf's key in a further place would be summed in another order

    def __init__(
        self,
        decoder: Decoder,  # the weights
        deterministic: bool,  # keep passes to batch-invariant shapes
        probed: InvariantShapes | None,  # the result of `probe_shapes` for this decoder; None probes now
        shapes: InvariantShapes | None,  # of a decoder with layers of the same sizes; None finds them
        compile: bool,  # run the parts of each layer through torch.compile
    ) -> None:
        self.decoder, self.compiled = decoder, compile
        self._run: RunLayers = partial(decoder.run, parts=compiled_parts()) if compile else decoder.run
        if shapes is None:
            shapes = find_shapes(decoder, probed, self._run) if deterministic else ANY_SHAPE
        self.shapes = shapes  # chunks of a prefill need not agree with others: products of any row count
        self._prefill_shapes = replace(shapes, query_buckets=PREFILL_BUCKETS, span=None)
        self.max_queries = max(shapes.query_buckets, default=MAX_QUERIES)
        self.gathers: bool | None = None  # None: where it pays
        # the captured CUDA graphs; None: passes are not captured. The host has the runs of recurrent layers
        captures = decoder.device.type == "cuda" and decoder.spec.recurrent is None
        self.graphs = Graphs(CudaGraphCapturer(decoder.device)) if captures else None
        self._ragged_rule = RaggedRule.of(decoder.spec, decoder.device)
        self._tables: Mapping[Rope, Tensor] = {}

    @property
    def fuses(self) -> bool:
        return self.graphs is not None

    @property
    def choices(self) -> list[str]:
        reason = unpacked_because(self.decoder.device, self.decoder.dtype)
        return [
            "packed weights" if reason is None else f"weights not packed ({reason})",
            str(self.shapes),
            "compiled layers" if self.compiled else "layers not compiled",
            "CUDA graphs" if self.graphs is not None else "no CUDA graphs",
            str(self._ragged_rule),
        ]

    def use_rotary_tables(self, tables: Mapping[Rope, Tensor]) -> None:
        self._tables = tables

    def run(self, pass_: Pass) -> Forward:
        if pass_.prefill:
            shapes = self._prefill_shapes
        else:
            shapes = self.shapes if pass_.invariant else ANY_SHAPE
        cache, (batch, columns) = pass_.cache, pass_.tokens.shape
        queries = shapes.queries(columns, batch)
        real = self._gathered(pass_, batch, queries)
        # a prefill's kernels of many columns take longer than their launches
        graphs = None if pass_.prefill else self.graphs
        # a ragged pass is not captured, but attends as those that are
        length = _length(shapes, cache, pass_.check(queries) + columns, coarse=graphs is not None)
        graphs = graphs if real is None else None
        shape = PassShape(
            pass_.first_row, batch, columns, queries, length, shapes.span, shapes.apart,
            pass_.plan, pass_.start, pass_.stop, pass_.aux_layers, pass_.head,
        )  # fmt: skip
        device, starts = self.decoder.device, [min(start, cache.scratch) for start in pass_.starts]
        inputs = PassInputs(
            starts[0] if batch == 1 and graphs is None else upload(starts, device),
            pass_.tokens if pass_.hidden is None or self.decoder.inputs is not None else None,
            pass_.hidden,
            None if real is None else upload(real, device),
            None if pass_.at is None else pass_.at.to(device),
            None if self.decoder.spec.recurrent is None else pass_.runs(queries, ragged=real is not None),
        )
        if graphs is None:
            return self._compute(cache, shape, inputs)
        return self._replayed(graphs, cache, shape, inputs)

    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, plan: Plan, exit: int | None
    ) -> FusedDraft | None:
        shape = self._draft_shape(cache, inputs, plan, exit)
        if shape is None or self.graphs is None or inputs.draws is None:
            return None
        width, batch = shape.first.columns, len(inputs.tokens)
        padded = [[*own, *[own[-1]] * (width - len(own))] for own in inputs.tokens]
        rows = zip(inputs.starts, inputs.lengths, strict=True)
        starts = [start if length else cache.scratch for start, length in rows]
        last = [len(own) - 1 for own in inputs.tokens]
        values = [*(id for own in padded for id in own), *starts, *last, *inputs.lengths]
        flat = upload(values, self.decoder.device)
        tokens, first, read, lengths = torch.split(flat, [batch * width, batch, batch, batch])
        compute = partial(draft_steps, partial(self._compute, cache), shape)
        steps = StepInputs(tokens.view(batch, width), first, read, lengths, inputs.draws)
        return self.graphs.run(compute, steps, owner=cache, key=shape, alive=self._tables)

    def _draft_shape(
        self, cache: CacheLayers, inputs: DraftInputs, plan: Plan, exit: int | None
    ) -> DraftShape | None:
        """Return the shape of a draft; None where its steps have to be single."""
        spec, shapes = self.decoder.spec, ANY_SHAPE if exit is None else self.shapes
        batch, steps = len(inputs.lengths), max(inputs.lengths)
        if inputs.draws is None or inputs.allowed is not None or inputs.draft_vocab is not None:
            return None
        if inputs.draws.dense and batch * steps * spec.vocab_size * torch.float32.itemsize > MOST_BYTES:
            return None
        width = max(FIRST, *map(len, inputs.tokens))
        first, later = shapes.queries(width, batch), shapes.queries(1, batch)
        # The last column of any row, padding and the steps past its own draft included.
        reach = max(first, width + steps - 2 + later)
        starts = inputs.starts
        if max(starts[row] for row in inputs.active) + reach > cache.scratch or reach > cache.slack:
            return None
        last = max(starts[row] + max(width, len(inputs.tokens[row]) + steps - 1) for row in inputs.active)
        whole = PassShape(
            0, batch, width, first, _length(shapes, cache, last, coarse=True), shapes.span, shapes.apart,
            plan, 0, spec.layers, () if exit is None else (exit,), head=True,
        )  # fmt: skip
        return DraftShape(whole, replace(whole, columns=1, queries=later), steps)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    def _replayed(self, graphs: Graphs, cache: CacheLayers, shape: PassShape, inputs: PassInputs) -> Forward:
        """Compute a pass by a graph of its layers; the head, whose logits are large, runs outside it."""
        padding = shape.queries - shape.columns
        layers = replace(inputs, tokens=_padded(inputs.tokens, padding), at=None)
        if inputs.hidden is not None:
            layers = replace(layers, hidden=F.pad(inputs.hidden, (0, 0, 0, padding)))
        whole = replace(shape, columns=shape.queries, head=False)
        compute = partial(self._compute, cache, whole)
        forward = graphs.run(compute, layers, owner=cache, key=whole, alive=self._tables)
        states = _asked(forward.hidden, shape, None)
        aux_states = {depth: _asked(own, shape, None) for depth, own in forward.aux_states.items()}
        return Forward(self._logits(states, shape, inputs.at) if shape.head else None, states, aux_states)

    def _logits(self, states: Tensor, shape: PassShape, at: Tensor | None) -> Tensor:
        """Return the logits of all columns [B, T, V], or of the column `at` [B] of each row, [B, 1, V]."""
        if at is not None:
            rows = torch.arange(shape.batch, device=states.device)
            states = states[rows, at][:, None]
        return self.decoder.head(states, shape.span)

    def _gathered(self, pass_: Pass, batch: int, queries: int) -> list[int] | None:
        """Return the columns b * T' + t that a ragged pass computes; None: the pass computes all columns."""
        if batch == 1 or self.gathers is False:
            return None
        if self.gathers is None and not self._ragged_rule.pays(batch * queries, sum(map(len, pass_.real))):
            return None
        return pass_.real_columns(queries)

    def _compute(self, cache: CacheLayers, shape: PassShape, inputs: PassInputs) -> Forward:
        real = inputs.real
        context = build_context(self.decoder.spec, self._tables, cache, shape, inputs.starts, real)
        context = context if inputs.runs is None else replace(context, runs=inputs.runs)
        if self.decoder.inputs is not None:
            of_tokens = self.decoder.layer_inputs(_tokens(shape, inputs), shape.span)
            context = replace(context, layer_inputs=of_tokens)
        hidden, aux_states, start = self._entering(shape, inputs), dict[int, Tensor](), shape.start
        for depth in sorted({*shape.aux_layers, shape.stop}):
            hidden = self._run(hidden, context, start, depth)
            start = depth
            if depth in shape.aux_layers:
                aux_states[depth] = _asked(hidden, shape, real)
        states = _asked(hidden, shape, real)
        if not shape.head:
            return Forward(None, states, aux_states)
        if real is not None and inputs.at is None:
            logits = _asked(self.decoder.head(hidden, shape.span), shape, real)
        else:
            logits = self._logits(states, shape, inputs.at)
        return Forward(logits, states, aux_states)

    def _entering(self, shape: PassShape, inputs: PassInputs) -> Tensor:
        """Return the states that enter the first layer: [B, T', D], or [N, D] of a ragged pass."""
        padding, real = shape.queries - shape.columns, inputs.real
        if inputs.hidden is not None:
            hidden = F.pad(inputs.hidden, (0, 0, 0, padding))
            return hidden if real is None else hidden.flatten(0, 1)[real]
        tokens, positions = _tokens(shape, inputs), None
        if self.decoder.learned_positions is not None:
            columns, starts = torch.arange(shape.queries, device=tokens.device), inputs.starts
            positions = columns + (starts if isinstance(starts, int) else starts[:, None])
            positions = positions.expand(shape.batch, shape.queries)
            positions = positions if real is None else positions.flatten()[real]
        return self.decoder.embed(tokens, positions)


def _length(shapes: InvariantShapes, cache: CacheLayers, positions: int, *, coarse: bool) -> int:
    """Return the attended length that covers so many positions; a coarse one is one of a few."""
    length = min(shapes.length(positions), cache.stored)
    return min(coarse_length(length), cache.stored) if coarse else length


def _tokens(shape: PassShape, inputs: PassInputs) -> Tensor:
    tokens = _padded(inputs.tokens, shape.queries - shape.columns)
    assert tokens is not None
    return tokens if inputs.real is None else tokens.flatten()[inputs.real]


def _asked(computed: Tensor, shape: PassShape, real: Tensor | None) -> Tensor:
    """Return the columns that the caller asked for, [B, T, ...], of [B, T', ...], or [N, ...] if ragged."""
    if real is not None:
        computed = at_columns(computed, real, shape.batch * shape.queries)
        computed = computed.view(shape.batch, shape.queries, -1)
    return computed[:, : shape.columns]


def _padded(tokens: Tensor | None, padding: int) -> Tensor | None:
    """Pad rows by their own last token: another one's embedding may not be finite."""
    if tokens is None or not padding:
        return tokens
    return torch.cat([tokens, tokens[:, -1:].expand(-1, padding)], 1)
