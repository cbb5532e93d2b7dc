"""The device side of a pass, as a function of tensors.

Contract: a `Bucket` holds everything that decides which operators run, on which shapes; `Inputs` holds
everything that differs between two passes of one bucket. So a pass can be captured once per bucket as a CUDA
graph and replayed on other inputs (`graphs`). The host reads no device value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Decoder, Plan, RunLayers
from foredraft.model.rope import Rope
from foredraft.model.runner.passes import PassShape, build_pass


@dataclass(frozen=True, slots=True)
class Bucket:
    """The key of all passes that run the same operators on the same shapes.

    Attributes:
        shape: The shape of the pass; its queries are T', the columns padded.
        columns: T, the columns that the caller asked for.
        plan: The sub-layers that run.
        start: The first layer.
        stop: The layer after the last.
        taps: The depths whose entering states are returned.
        head: Compute logits.
    """

    shape: PassShape
    columns: int
    plan: Plan
    start: int
    stop: int
    taps: tuple[int, ...]
    head: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values that a pass computes on.

    Attributes:
        starts: The position of each row's first column, [B]; a number for a single row, because slices cost
            the host less than indices.
        tokens: Token ids, [B, T]; None where `hidden` is given.
        hidden: States that enter the bucket's first layer, [B, T, D]; None where `tokens` are given.
        real: The columns b * T' + t that a ragged pass computes, [N]; None computes all.
        at: The column of each row whose logits are wanted, [B]; None wants all.
    """

    starts: Tensor | int
    tokens: Tensor | None
    hidden: Tensor | None = None
    real: Tensor | None = None
    at: Tensor | None = None

    def signature(self) -> tuple[object, ...]:
        """Return what a captured graph fixes: which inputs there are, of which shapes and dtypes."""
        return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in self._all())

    def copied(self) -> Inputs:
        """Return inputs with tensors of their own."""

        def copy(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone()

        starts = self.starts.clone() if isinstance(self.starts, Tensor) else self.starts
        return Inputs(starts, copy(self.tokens), copy(self.hidden), copy(self.real), copy(self.at))

    def fill(self, other: Inputs) -> None:
        """Copy the values of inputs of the same signature into these tensors."""
        for mine, theirs in zip(self._all(), other._all(), strict=True):
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                mine.copy_(theirs, non_blocking=True)

    def _all(self) -> tuple[Tensor | int | None, ...]:
        return self.starts, self.tokens, self.hidden, self.real, self.at


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of a forward. Padding columns mean nothing, and are finite where the row's real ones are.

    Attributes:
        logits: [B, T, V] float32, or [B, 1, V] where `at` chose a column; None where no logits were wanted.
        hidden: States that leave the last layer of the pass, [B, T, D].
        taps: By depth, the states that enter the layer, [B, T, D].
    """

    logits: Tensor | None
    hidden: Tensor
    taps: dict[int, Tensor]

    def copied(self) -> Forward:
        """Return a result with tensors of its own."""
        logits = None if self.logits is None else self.logits.clone()
        return Forward(logits, self.hidden.clone(), {d: tap.clone() for d, tap in self.taps.items()})


@dataclass(frozen=True, slots=True)
class Body:
    """The passes of a decoder over one cache.

    Attributes:
        decoder: The weights.
        run: `Decoder.run`, compiled or not.
        tables: The rotary tables, [P, 2, D] each.
        cache: The KV cache.
    """

    decoder: Decoder
    run: RunLayers
    tables: Mapping[Rope, Tensor]
    cache: CacheLayers

    def __call__(self, bucket: Bucket, inputs: Inputs) -> Forward:
        """Run a pass."""
        shape, real = bucket.shape, inputs.real
        pass_ = build_pass(self.decoder.spec, self.tables, self.cache, shape, inputs.starts, real)
        hidden = self._entering(bucket, inputs)
        taps: dict[int, Tensor] = {}
        start = bucket.start
        for depth in sorted({*bucket.taps, bucket.stop}):
            hidden = self.run(hidden, pass_, bucket.plan, start, depth)
            start = depth
            if depth in bucket.taps:
                taps[depth] = _columns(hidden, bucket, real)
        states = _columns(hidden, bucket, real)
        if not bucket.head:
            return Forward(None, states, taps)
        if inputs.at is not None:
            rows = torch.arange(shape.batch, device=states.device)
            logits = self.decoder.head(states[rows, inputs.at][:, None], shape.span)
        elif real is not None:
            logits = _columns(self.decoder.head(hidden, shape.span), bucket, real)
        else:
            logits = self.decoder.head(states, shape.span)
        return Forward(logits, states, taps)

    def _entering(self, bucket: Bucket, inputs: Inputs) -> Tensor:
        """Return the states that enter the first layer: [B, T', D], or [N, D] of a ragged pass."""
        padding, real = bucket.shape.queries - bucket.columns, inputs.real
        if inputs.hidden is not None:
            hidden = F.pad(inputs.hidden, (0, 0, 0, padding))
            return hidden if real is None else hidden.flatten(0, 1)[real]
        assert inputs.tokens is not None
        tokens = inputs.tokens
        if padding:  # by the row's own last token: another one's embedding may not be finite
            tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, padding)], 1)
        return self.decoder.embed(tokens if real is None else tokens.flatten()[real])


def _columns(computed: Tensor, bucket: Bucket, real: Tensor | None) -> Tensor:
    """Return the caller's columns [B, T, ...] of [B, T', ...], or of [N, ...] in a ragged pass."""
    if real is None:
        return computed[:, : bucket.columns]
    batch, queries = bucket.shape.batch, bucket.shape.queries
    grid = computed.new_zeros(batch * queries, computed.shape[-1]).index_copy_(0, real, computed)
    return grid.view(batch, queries, -1)[:, : bucket.columns]
