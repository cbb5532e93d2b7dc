"""The draw of a draft step: from a drafter's logits to a token of every row and the q that it was drawn from.

All are functions of trees of tensors, which the draft loop and a draft in one call share (`Replays`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import DRAFT, DrawKeys, HashedKeys, Noise, NoiseKeys
from foredraft.decode.penalty_context import PenaltyContext
from foredraft.decode.sampling import SamplingTable, distribution_of

__all__ = ["Drawn", "StepDraws", "StepLogits", "draw", "hashed", "next_in_draw"]


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a draft step, [B, 1, V], and how a token is drawn from them.

    Attributes:
        logits: The drafter's, divided by its temperature.
        table: Sampling parameters of the rows.
        masks: Of the constraints, [B, 1, V] bool.
        penalties: What the rows said, along the draft.
        keys: Noise keys of the step; None where every row drafts greedily.
        noise: Draws by the keys.
        greedy: Draw the argmax.
    """

    logits: Tensor
    table: SamplingTable
    masks: Tensor | None
    penalties: PenaltyContext | None
    keys: DrawKeys | None
    noise: Noise
    greedy: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of every row, drawn from q.

    Attributes:
        q: The distributions, at one position.
        token: [B, 1] int64.
        drawable: [B, 1] bool, the row's token counts.
        sound: [B, 1] bool, its logits were finite.
    """

    q: Distribution
    token: Tensor
    drawable: Tensor
    sound: Tensor


def draw(step: StepLogits) -> Drawn:
    """Transform the logits of a step, and draw one token of every row."""
    q, finite = distribution_of(step.logits, step.table, step.masks, step.penalties, argmax=step.greedy)
    # A mask may leave a drafter nothing to draw; that is no fault of its logits.
    sound = finite if step.masks is None else step.logits.amax(-1).isfinite()
    return Drawn(q, _token(q, step), finite & sound, sound)


def _token(q: Distribution, step: StepLogits) -> Tensor:
    """Return one token of every row, [B, 1]; a one-hot q needs no noise."""

    def pick(weights: Tensor) -> Tensor:
        assert step.keys is not None
        return step.noise.pick(weights, step.keys, DRAFT)

    return q.draw(pick)


def next_in_draw(step: StepLogits, drawn: Drawn, count: int) -> Tensor:
    """Return the `count` tokens of every row that come next in the draw of a step, [B, 1, count] int64.

    They are what the same draw gives without the tokens before them; -1 where no token is left.
    """
    logits, probs, token = step.logits, drawn.q.probs, drawn.token
    if step.masks is not None:
        logits = logits.masked_fill(~step.masks, -math.inf)
    found = [token]
    for _ in range(count):
        logits = logits.scatter(2, found[-1][..., None].clamp_min(0), -math.inf)
        token = logits.argmax(-1)
        token = token.where(logits.amax(-1) > -math.inf, -1)
        if probs is not None:
            assert step.keys is not None
            probs = probs.scatter(2, found[-1][..., None].clamp_min(0), 0.0)
            picked = step.noise.pick(probs, step.keys, DRAFT).where(probs.amax(-1) > 0, -1)
            token = picked if drawn.q.one_hot is None else token.where(drawn.q.one_hot[:, None], picked)
        found.append(token)
    return torch.stack(found[1:], 2)


def hashed(keys: NoiseKeys) -> HashedKeys:
    """Return the noise keys of a round's drafts, hashed."""
    return HashedKeys(keys.base, keys.vocab_ops, keys.bits(DRAFT))


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Draws the tokens of a draft whose steps run in one call; attributes as `StepLogits`.

    Attributes:
        temperature: Divides the logits.
        keys: Noise keys of all steps.
    """

    temperature: float
    table: SamplingTable
    penalties: PenaltyContext | None
    keys: HashedKeys | None
    noise: Noise
    greedy: bool

    @property
    def dense(self) -> bool:
        return self.keys is not None

    def __call__(self, logits: Tensor, drawn: Tensor) -> Drawn:
        count = drawn.shape[1]
        penalties = self.penalties and self.penalties.along(drawn, ahead=count)
        keys = self.keys and self.keys.column(count)
        logits = logits if self.temperature == 1 else logits / self.temperature
        return draw(StepLogits(logits, self.table, None, penalties, keys, self.noise, self.greedy))
