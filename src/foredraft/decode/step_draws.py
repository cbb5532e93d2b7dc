"""The draws of draft steps: from a drafter's logits to a token of every row and its q."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.noise import DRAFT, DrawKeys, HashedKeys, Noise, NoiseKeys, draw_from
from foredraft.decode.sampling import PenaltyContext, SamplingTable, distribution_of


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of a draft step, [B, 1, V], and how a token is drawn from them."""

    logits: Tensor  # the drafter's, divided by its temperature
    table: SamplingTable  # sampling parameters of the rows
    masks: Tensor | None  # of the constraints, [B, 1, V] bool
    penalties: PenaltyContext | None  # what the rows said, along the draft
    keys: DrawKeys | None  # noise keys of the step; None where every row drafts greedily
    noise: Noise  # draws by the keys
    greedy: bool  # draw the argmax


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of every row, drawn from q."""

    q: Distribution  # the distributions, at one position
    token: Tensor  # [B, 1] int64
    drawable: Tensor  # [B, 1] bool, the row's token counts
    sound: Tensor  # [B, 1] bool, its logits were finite
    further: Tensor | None = None  # [B, 1, M] next in the draw, for siblings
    logits: Tensor | None = None  # [B, 1, V] for the policy, where it may end a draft by them


def draw(step: StepLogits) -> Drawn:
    """Transform the logits of a step, and draw one token of every row."""
    q, finite = distribution_of(step.logits, step.table, step.masks, step.penalties, argmax=step.greedy)
    # A mask may leave a drafter nothing to draw; that is no fault of its logits.
    sound = finite if step.masks is None else step.logits.amax(-1).isfinite()
    return Drawn(q, _token(q, step), finite & sound, sound)


def _token(q: Distribution, step: StepLogits) -> Tensor:
    return draw_from(q, step.keys, step.noise, DRAFT)


def next_in_draw(step: StepLogits, drawn: Drawn, count: int) -> Tensor:
    """Return the tokens that come next in the same draw, [B, 1, count] int64; -1 where none is left."""
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
    return HashedKeys(keys.base, keys.vocab_ops, keys.bits(DRAFT))


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Draws the tokens of one draft, step after step; attributes as `StepLogits`."""

    temperature: float  # divides the logits
    table: SamplingTable
    penalties: PenaltyContext | None
    keys: DrawKeys | None  # noise keys of all steps
    noise: Noise
    greedy: bool

    @property
    def dense(self) -> bool:
        return self.keys is not None

    def step(self, logits: Tensor, drawn: Tensor, masks: Tensor | None = None) -> StepLogits:
        """Return the step after the tokens drawn so far, [B, j]."""
        count = drawn.shape[1]
        penalties = self.penalties and self.penalties.along(drawn, ahead=count)
        keys = self.keys and self.keys.column(count)
        logits = logits if self.temperature == 1 else logits / self.temperature
        return StepLogits(logits, self.table, masks, penalties, keys, self.noise, self.greedy)

    def __call__(self, logits: Tensor, drawn: Tensor) -> Drawn:
        return draw(self.step(logits, drawn))
