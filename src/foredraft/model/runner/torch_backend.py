"""The back end of PyTorch's operators: passes at batch-invariant shapes, ragged, or replayed as CUDA graphs.

Contract: `_compute` is the device side of a pass, as a function of a `PassShape` and of `PassInputs`, and
reads no other value of the pass. So a pass can be captured once per shape and replayed on other inputs
(`graphs`). The host reads no device value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Decoder, RunLayers
from foredraft.model.forward_context import PassInputs, PassShape, at_columns, build_context
from foredraft.model.plan import Plan
from foredraft.model.rope import Rope
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
        length = min(shapes.length(pass_.check(queries) + columns), cache.stored)
        real = self._gathered(pass_, batch, queries)
        # a prefill's kernels of many columns take longer than their launches
        graphs = None if pass_.prefill or real is not None else self.graphs
        if graphs is not None:
            length = min(coarse_length(length), cache.stored)
        shape = PassShape(
            pass_.first_row, batch, columns, queries, length, shapes.span, shapes.apart,
            pass_.plan, pass_.start, pass_.stop, pass_.taps, pass_.head,
        )  # fmt: skip
        device, starts = self.decoder.device, [min(start, cache.scratch) for start in pass_.starts]
        inputs = PassInputs(
            starts[0] if batch == 1 and graphs is None else upload(starts, device),
            pass_.tokens if pass_.hidden is None else None,
            pass_.hidden,
            None if real is None else upload(real, device),
            None if pass_.at is None else pass_.at.to(device),
        )
        if graphs is None:
            return self._compute(cache, shape, inputs)
        return graphs.run(self._compute, cache, shape, inputs, alive=self._tables)

    def draft(
        self, cache: CacheLayers, inputs: DraftInputs, plan: Plan, tap: int | None
    ) -> FusedDraft | None:
        return None

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

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
        hidden, taps, start = self._entering(shape, inputs), dict[int, Tensor](), shape.start
        for depth in sorted({*shape.taps, shape.stop}):
            hidden = self._run(hidden, context, start, depth)
            start = depth
            if depth in shape.taps:
                taps[depth] = _asked(hidden, shape, real)
        states = _asked(hidden, shape, real)
        if not shape.head:
            return Forward(None, states, taps)
        if inputs.at is not None:
            rows = torch.arange(shape.batch, device=states.device)
            logits = self.decoder.head(states[rows, inputs.at][:, None], shape.span)
        elif real is not None:
            logits = _asked(self.decoder.head(hidden, shape.span), shape, real)
        else:
            logits = self.decoder.head(states, shape.span)
        return Forward(logits, states, taps)

    def _entering(self, shape: PassShape, inputs: PassInputs) -> Tensor:
        """Return the states that enter the first layer: [B, T', D], or [N, D] of a ragged pass."""
        padding, real = shape.queries - shape.columns, inputs.real
        if inputs.hidden is not None:
            hidden = F.pad(inputs.hidden, (0, 0, 0, padding))
            return hidden if real is None else hidden.flatten(0, 1)[real]
        assert inputs.tokens is not None
        tokens = inputs.tokens
        if padding:  # by the row's own last token: another one's embedding may not be finite
            tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, padding)], 1)
        return self.decoder.embed(tokens if real is None else tokens.flatten()[real])


def _asked(computed: Tensor, shape: PassShape, real: Tensor | None) -> Tensor:
    """Return the columns that the caller asked for, [B, T, ...], of [B, T', ...], or [N, ...] if ragged."""
    if real is not None:
        computed = at_columns(computed, real, shape.batch * shape.queries)
        computed = computed.view(shape.batch, shape.queries, -1)
    return computed[:, : shape.columns]
