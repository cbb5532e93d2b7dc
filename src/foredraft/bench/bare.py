"""Bare rounds: the forwards of a draft and of its verifying pass as decoding has them, laid out to be timed.

Contract: nothing but forwards through the runner, as the engine calls it, over a cache of their own, and the
draws of a draft where they are asked for. Each forward is timed behind others of its own kind (`SETTLE`), or
one (`ONCE`), as in decoding: plain steps follow plain steps, verifying passes other ones, rounds rounds. What
a draft takes is what a round has beyond its verifying pass, so that it pays for weights that it drives out of
the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.draft_pass import DraftPass
from foredraft.model.runner import Resume, SamplingInputs

__all__ = ["ONCE", "SETTLE", "BareRounds", "Draws", "Work", "draft_seconds", "one_after_the_other"]

# seconds for which a forward or a round runs just before it is timed: a cache that another one has filled
# takes several to hold what they need
SETTLE = 0.006
ONCE = 1e-9  # a single run: with no host work between them plain steps settle below what decoding has

Work = Callable[[], object]


def _nothing(column: int, logits: Tensor) -> object:
    return None


@dataclass(frozen=True, slots=True)
class Draws:
    """How the tokens of one draft are drawn. drawing: of one in one call; None for the likeliest. draw: of
    single steps, by the draft's column and the logits [B, 1, V]; not at all unless given."""

    sampling_inputs: SamplingInputs | None = None
    draw: Callable[[int, Tensor], object] = _nothing


class BareRounds:
    """Of `batch` sequences with `context` tokens each, in a cache with room for `room` more."""

    def __init__(self, target: Any, batch: int, context: int, room: int) -> None:
        self.target, self.batch, self.context = target, batch, context
        self.cache = target.new_cache(batch, context + room)

    def tokens(self, width: int) -> Tensor:
        return torch.zeros(self.batch, width, dtype=torch.int64, device=self.cache.device)

    def forward(self, width: int, resume: Resume | None = None) -> Work:
        """A pass of the target over so many tokens of each sequence: a plain step, or a verifying pass."""
        target, cache, tokens = self.target, self.cache, self.tokens(width)
        starts = [self.context - 1] * self.batch
        return lambda: target.forward(cache, tokens, starts, resume=resume)

    def draft(self, draft_pass: DraftPass, length: int, draws: Callable[[], Draws] = Draws) -> Work:
        """`length` tokens of each sequence, in one call where the engine would, else one after the other, so
        that only the first one's forward finds the weights as the target left them. draws: asked for each
        draft. The target's cache serves for the target's own layers, too."""
        batch, context, own = self.batch, self.context, draft_pass.runner
        cache = self.cache if own is self.target else own.new_cache(batch, context + length)
        tokens = self.tokens(1)

        def draft() -> None:
            how = draws()
            starts, most = [context - 1] * batch, [length] * batch
            if draft_pass.at_once(cache, [[0]] * batch, starts, most, how.sampling_inputs) is not None:
                return
            for column in range(length):
                logits = draft_pass(cache, tokens, [context - 1 + column] * batch).logits
                assert logits is not None
                how.draw(column, logits)

        return draft


def one_after_the_other(draft: Work, verify: Work) -> Work:
    """The forwards of a round."""

    def round() -> None:
        draft()
        verify()

    return round


def draft_seconds(rounds: Sequence[float], verifying: Sequence[float]) -> float:
    """Of a draft: what a round takes beyond a verifying pass that follows another one. The median of the
    differences within the repeats, so that a machine that slows down burdens both sides alike."""
    return max(0.0, median(whole - part for whole, part in zip(rounds, verifying, strict=True)))
