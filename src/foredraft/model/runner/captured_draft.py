"""A fused draft by PyTorch's operators: all steps of a batch's draft, which one CUDA graph holds.

Contract: the draft of the single steps, by the same noise. Every row takes as many steps as the longest
draft. What a row computes past its own draft lies past its length in the cache, and is no part of the result.
The host reads no device value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.forward_context import PassInputs, PassShape
from foredraft.model.plan import Plan
from foredraft.model.runner.fused import DraftInputs, DrawnToken, Draws, FusedDraft
from foredraft.model.runner.invariant_shapes import InvariantShapes
from foredraft.model.runner.passes import Forward
from foredraft.model.spec import ModelSpec
from foredraft.model.transfers import upload

__all__ = ["DraftShape", "StepInputs", "draft_shape", "draft_steps", "step_inputs"]

FIRST: Final = 2  # columns of the first step: after a draft that was accepted whole, it reads two tokens
# Bytes of the distributions of a sampled draft, at most: a graph keeps them for good. Larger ones take longer
# to compute than to launch.
MOST_BYTES: Final = 2**23


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The key of all drafts that run the same operators on the same shapes.

    Attributes:
        first: The shape of the first step.
        later: The shape of the others, of one column.
        steps: K.
    """

    first: PassShape
    later: PassShape
    steps: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The values in which drafts of one shape differ.

    Attributes:
        tokens: The tokens that each row reads first, [B, T] int64, padded on the right.
        starts: The position of the first, [B] int64.
        last: The column of the last, [B] int64.
        lengths: The tokens that each row drafts, [B] int64.
        draws: Draws the tokens.
    """

    tokens: Tensor
    starts: Tensor
    last: Tensor
    lengths: Tensor
    draws: Draws


def draft_shape(
    spec: ModelSpec,
    shapes: InvariantShapes,
    cache: CacheLayers,
    inputs: DraftInputs,
    plan: Plan,
    tap: int | None,
    length_of: Callable[[int], int],
) -> DraftShape | None:
    """Return the shape of a draft; None where its steps have to be single.

    Args:
        spec: The model.
        shapes: Of the passes.
        cache: The KV cache.
        inputs: What the rows read and draft.
        plan: The sub-layers that run.
        tap: The depth whose entering states are returned.
        length_of: Returns the attended length that covers so many positions.
    """
    batch, steps = len(inputs.lengths), max(inputs.lengths)
    if inputs.draws is None or inputs.allowed is not None:
        return None
    if inputs.draws.dense and batch * steps * spec.vocab_size * torch.float32.itemsize > MOST_BYTES:
        return None
    width = max(FIRST, *map(len, inputs.tokens))
    first, later = shapes.queries(width, batch), shapes.queries(1, batch)
    # The last column of any row, padding and the steps past its own draft included.
    reach = max(first, width + steps - 2 + later)
    if max(inputs.starts[row] for row in inputs.active) + reach > cache.scratch or reach > cache.slack:
        return None
    last = max(inputs.starts[row] + max(width, len(inputs.tokens[row]) + steps - 1) for row in inputs.active)
    taps = () if tap is None else (tap,)
    whole = PassShape(
        0,
        batch,
        width,
        first,
        length_of(last),
        shapes.span,
        shapes.apart,
        plan,
        0,
        spec.layers,
        taps,
        head=True,
    )
    return DraftShape(whole, replace(whole, columns=1, queries=later), steps)


def step_inputs(
    inputs: DraftInputs, shape: DraftShape, cache: CacheLayers, device: torch.device
) -> StepInputs:
    """Return the inputs of a draft on the device, by one copy."""
    assert inputs.draws is not None
    width, batch = shape.first.columns, len(inputs.tokens)
    padded = [[*own, *[own[-1]] * (width - len(own))] for own in inputs.tokens]
    starts = [
        start if length else cache.scratch
        for start, length in zip(inputs.starts, inputs.lengths, strict=True)
    ]
    last = [len(own) - 1 for own in inputs.tokens]
    flat = upload([*(id for own in padded for id in own), *starts, *last, *inputs.lengths], device)
    tokens, first, read, lengths = torch.split(flat, [batch * width, batch, batch, batch])
    return StepInputs(tokens.view(batch, width), first, read, lengths, inputs.draws)


def draft_steps(
    compute: Callable[[PassShape, PassInputs], Forward], shape: DraftShape, inputs: StepInputs
) -> FusedDraft:
    """Take all steps of a draft.

    Args:
        compute: Computes a pass.
        shape: The shape of the draft.
        inputs: Its inputs.
    """
    tokens, starts = inputs.tokens, inputs.starts
    rows = torch.arange(len(tokens), device=tokens.device)
    at: Tensor | None = inputs.last
    drawn, states = list[DrawnToken](), list[Tensor]()
    drafted = tokens[:, :0]  # [B, j]
    for step in range(shape.steps):
        forward = compute(shape.later if step else shape.first, PassInputs(starts, tokens, at=at))
        assert forward.logits is not None
        states += [tap if at is None else tap[rows, at][:, None] for tap in forward.taps.values()]
        starts = starts + (1 if at is None else at + 1)
        at = None
        drawn.append(inputs.draws(forward.logits, drafted))
        tokens = drawn[-1].token
        drafted = torch.cat([drafted, tokens], 1)
    wanted = torch.arange(shape.steps, device=tokens.device) < inputs.lengths[:, None]  # [B, K]
    return FusedDraft(
        tokens=drafted * wanted,
        finite=torch.cat([each.drawable for each in drawn], 1) & wanted,
        probs=None,
        states=torch.cat(states, 1).where(wanted[..., None], 0.0) if states else None,
        drawn=tuple(drawn),
    )
