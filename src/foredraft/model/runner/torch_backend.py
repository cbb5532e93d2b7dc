"""The back end of PyTorch's operators: passes at batch-invariant shapes, ragged, or replayed as CUDA graphs.

Contract: `_compute` is the device side of a pass, as a function of a `PassShape` and of `PassInputs`, and
reads no other value of the pass. So a pass can be captured once per shape and replayed on other inputs
(`graphs`). The host reads no device value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Decoder, RunLayers
from foredraft.model.forward_context import PassInputs, PassShape, at_columns, build_context
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope
from foredraft.model.runner.captured_draft import draft_shape, draft_steps, step_inputs
from foredraft.model.runner.compiled import compiled_parts
from foredraft.model.runner.fused import DraftInputs, FusedDraft
from foredraft.model.runner.graphs import CudaGraphCapturer, Graphs, coarse_length
from foredraft.model.runner.invariant_shapes import ANY_SHAPE, InvariantShapes, find_shapes
from foredraft.model.runner.packed import unpacked_because
from foredraft.model.runner.passes import Forward, Pass
from foredraft.model.runner.ragged import RaggedRule
from foredraft.model.transfers import upload

__all__ = ["CHUNK", "TorchBackend"]

CHUNK = 256  # positions of a prefill pass; prompts are cut at its multiples
PREFILL_BUCKETS = (8, 16, 32, 64, 128, CHUNK)  # columns that a prefill pass is padded to


class TorchBackend:
    """Runs the passes of one decoder by PyTorch's operators.

    Args:
        decoder: The weights.
        deterministic: Keep passes to batch-invariant shapes.
        probed: The result of `probe_shapes` for this decoder; None probes now.
        shapes: The shapes of another decoder with layers of the same sizes; None finds them.
        compile: Run the parts of each layer through torch.compile.

    Attributes:
        shapes: The shapes of its passes.
        gathers: Whether passes gather the real columns of a ragged batch; None: where it pays (`ragged`).
        graphs: The captured CUDA graphs; None: passes are not captured.
    """

    native = False
    takes_leaves = False  # a leaf's key, in a further place behind a mask, would be summed in another order

    def __init__(
        self,
        decoder: Decoder,
        deterministic: bool,
        probed: InvariantShapes | None,
        shapes: InvariantShapes | None,
        compile: bool,
    ) -> None:
        self.decoder, self.compiled = decoder, compile
        self._run: RunLayers = partial(decoder.run, parts=compiled_parts()) if compile else decoder.run
        if shapes is None:
            shapes = find_shapes(decoder, probed, self._run) if deterministic else ANY_SHAPE
        self.shapes, self._prefill_shapes = shapes, shapes.for_prefill(PREFILL_BUCKETS)
        self.gathers: bool | None = None
        self.graphs = Graphs(CudaGraphCapturer(decoder.device)) if decoder.device.type == "cuda" else None
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
            pass_.plan, pass_.start, pass_.stop, pass_.taps, pass_.head,
        )  # fmt: skip
        device, starts = self.decoder.device, [min(start, cache.scratch) for start in pass_.starts]
        inputs = PassInputs(
            starts[0] if batch == 1 and graphs is None else upload(starts, device),
            pass_.tokens if pass_.hidden is None or self.decoder.inputs is not None else None,
            pass_.hidden,
            None if real is None else upload(real, device),
            None if pass_.at is None else pass_.at.to(device),
        )
        if graphs is None:
            return self._compute(cache, shape, inputs)
        return self._replayed(graphs, cache, shape, inputs)

    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, plan: Plan, tap: int | None
    ) -> FusedDraft | None:
        graphs = self.graphs
        if graphs is None or inputs.words is not None:
            return None
        shapes = ANY_SHAPE if tap is None else self.shapes
        length_of = partial(_length, shapes, cache, coarse=True)
        shape = draft_shape(self.decoder.spec, shapes, cache, inputs, plan, tap, length_of)
        if shape is None:
            return None
        compute = partial(draft_steps, partial(self._compute, cache), shape)
        steps = step_inputs(inputs, shape, cache, self.decoder.device)
        return graphs.run(compute, steps, owner=cache, key=shape, alive=self._tables)

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
        """Compute a pass by a graph of its layers over all queries.

        So passes of different columns share a graph. The head runs outside it: logits of a vocabulary are a
        hundred times the states that they are made of, and each graph would keep its own.
        """
        padding = shape.queries - shape.columns
        layers = replace(inputs, tokens=_padded(inputs.tokens, padding), at=None)
        if inputs.hidden is not None:
            layers = replace(layers, hidden=F.pad(inputs.hidden, (0, 0, 0, padding)))
        whole = replace(shape, columns=shape.queries, head=False)
        compute = partial(self._compute, cache, whole)
        forward = graphs.run(compute, layers, owner=cache, key=whole, alive=self._tables)
        states = _asked(forward.hidden, shape, None)
        taps = {depth: _asked(tap, shape, None) for depth, tap in forward.taps.items()}
        return Forward(self._logits(states, shape, inputs.at) if shape.head else None, states, taps)

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
        """Compute a pass on the device."""
        real = inputs.real
        context = build_context(self.decoder.spec, self._tables, cache, shape, inputs.starts, real)
        if self.decoder.inputs is not None:
            of_tokens = self.decoder.layer_inputs(_tokens(shape, inputs), shape.span)
            context = replace(context, layer_inputs=of_tokens)
        hidden, taps, start = self._entering(shape, inputs), dict[int, Tensor](), shape.start
        for depth in sorted({*shape.taps, shape.stop}):
            hidden = self._run(hidden, context, start, depth)
            start = depth
            if depth in shape.taps:
                taps[depth] = _asked(hidden, shape, real)
        states = _asked(hidden, shape, real)
        if not shape.head:
            return Forward(None, states, taps)
        if real is not None and inputs.at is None:
            logits = _asked(self.decoder.head(hidden, shape.span), shape, real)
        else:
            logits = self._logits(states, shape, inputs.at)
        return Forward(logits, states, taps)

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
    """Return the tokens of the computed columns: [B, T'], or [N] of a ragged pass."""
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
