"""The body of a pass: all that runs on the device, as a function of tensors.

Contract: everything that decides which operators run, and on which shapes, is the `Bucket`; everything that
changes between two passes of one bucket is in `Inputs`. So a body may be recorded once per bucket and
replayed on other inputs (`graphs`). No device value is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import Pass
from foredraft.model.cache import KVCache
from foredraft.model.decoder import Decoder, Plan
from foredraft.model.rope import Rope
from foredraft.model.runner.passes import PassShape, build_pass

RunLayers = Callable[[Tensor, Pass, Plan, int, int], Tensor]  # what `Decoder.run` is


@dataclass(frozen=True, slots=True)
class Bucket:
    """What two passes have in common that run the same operators on the same shapes."""

    shape: PassShape  # its queries are T', the columns padded
    columns: int  # T
    plan: Plan
    start: int  # the pass enters this layer,
    stop: int  # and leaves before this one
    taps: tuple[int, ...]
    head: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a pass computes on."""

    starts: Tensor | int  # [B]; a single row's may be a number, for slices cost the host less than indices
    tokens: Tensor | None  # [B, T]
    hidden: Tensor | None = None  # [B, T, D] states entering the bucket's first layer, instead of tokens
    real: Tensor | None = None  # [N] columns b * T' + t that are computed, where not all are
    at: Tensor | None = None  # [B] the columns whose logits are wanted, where not all are


@dataclass(frozen=True, slots=True)
class Forward:
    """What came out of a forward. What it holds of columns that are not real means nothing, but is finite
    where the row is."""

    logits: Tensor | None  # [B, T, V] float32, or [B, 1, V] where `at` chose a column
    hidden: Tensor  # [B, T, D] states at `stop`
    taps: dict[int, Tensor]  # depth -> [B, T, D] states entering that layer


@dataclass(frozen=True, slots=True)
class Body:
    """A decoder's passes over one cache."""

    decoder: Decoder
    run: RunLayers  # the decoder's own, or a compiled one
    tables: Mapping[Rope, Tensor]  # rotary, [P, 2, D]
    cache: KVCache

    def __call__(self, bucket: Bucket, inputs: Inputs) -> Forward:
        shape, real = bucket.shape, inputs.real
        pass_ = build_pass(self.decoder.spec, self.tables, self.cache, shape, inputs.starts, real)
        hidden = self._entering(bucket, inputs)
        kept: dict[int, Tensor] = {}
        start = bucket.start
        for depth in sorted({*bucket.taps, bucket.stop}):
            hidden = self.run(hidden, pass_, bucket.plan, start, depth)
            start = depth
            if depth in bucket.taps:
                kept[depth] = _columns(hidden, bucket, real)
        states = _columns(hidden, bucket, real)
        if not bucket.head:
            return Forward(None, states, kept)
        if inputs.at is not None:
            rows = torch.arange(shape.batch, device=states.device)
            logits = self.decoder.head(states[rows, inputs.at][:, None], shape.span)
        elif real is not None:
            logits = _columns(self.decoder.head(hidden, shape.span), bucket, real)
        else:
            logits = self.decoder.head(states, shape.span)
        return Forward(logits, states, kept)

    def _entering(self, bucket: Bucket, inputs: Inputs) -> Tensor:
        """[B, T', D], or [N, D] of a gathered pass."""
        padding, real = bucket.shape.queries - bucket.columns, inputs.real
        if inputs.hidden is not None:
            hidden = F.pad(inputs.hidden, (0, 0, 0, padding))
            return hidden if real is None else hidden.flatten(0, 1)[real]
        assert inputs.tokens is not None
        tokens = F.pad(inputs.tokens, (0, padding)) if padding else inputs.tokens
        return self.decoder.embed(tokens if real is None else tokens.flatten()[real])


def _columns(computed: Tensor, bucket: Bucket, real: Tensor | None) -> Tensor:
    """[B, T, ...] of the columns that were computed: [B, T', ...], or [N, ...] of a gathered pass."""
    if real is None:
        return computed[:, : bucket.columns]
    batch, queries = bucket.shape.batch, bucket.shape.queries
    grid = computed.new_zeros(batch * queries, computed.shape[-1]).index_copy_(0, real, computed)
    return grid.view(batch, queries, -1)[:, : bucket.columns]
