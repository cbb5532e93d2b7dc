"""Bare forwards: drafts and verifying passes as decoding runs them, without the engine, laid out to be timed.

Contract: forwards through the runner over a cache of their own, and the draws of a draft where they are asked
for. A draft costs what a round (draft, then verifying pass) takes beyond a verifying pass: so it pays for
weights that it drives out of the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.decode.drafter import Drafter, DraftPass
from foredraft.model.runner import DraftInputs, Resume, SamplingInputs
from foredraft.profiling.timing import Turns, Work

__all__ = ["SETTLE", "BareForwards", "Draws", "ForwardMeter", "draft_seconds", "in_sequence", "reading"]

# Seconds for which a forward runs before it is timed: a cache that another forward filled takes several to
# hold what this one needs. Decoding runs plain steps after plain steps.
SETTLE = 0.006


def _no_draw(column: int, logits: Tensor) -> object:
    return None


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a timed draft.

    Attributes:
        sampling: Of a fused draft; None draws the argmax.
        draw: Of single steps: gets the column and the logits [B, 1, V]; draws nothing by default.
    """

    sampling: SamplingInputs | None = None
    draw: Callable[[int, Tensor], object] = _no_draw


class BareForwards:
    """Forwards over `batch` sequences of `context` tokens, in a cache with room for `room` tokens more."""

    def __init__(self, target: Any, batch: int, context: int, room: int) -> None:
        self.target, self.batch, self.context = target, batch, context
        self.cache = target.new_cache(batch, context + room)

    def tokens(self, width: int) -> Tensor:
        """Return tokens [batch, width]."""
        return torch.zeros(self.batch, width, dtype=torch.int64, device=self.cache.device)

    def verify(self, width: int, resume: Resume | None = None) -> Work:
        """Return a pass of the target over `width` tokens of each sequence; width 1 is a plain step."""
        target, cache, tokens = self.target, self.cache, self.tokens(width)
        starts = [self.context - 1] * self.batch
        return lambda: target.forward(cache, tokens, starts, resume=resume)

    def draft(self, draft_pass: DraftPass, length: int, draws: Callable[[], Draws] = Draws) -> Work:
        """Return a draft of `length` tokens of each sequence, in one call where the engine would.

        draws: Asked once for each draft. A draft of the target's own layers shares the target's cache.
        """
        batch, context, runner = self.batch, self.context, draft_pass.runner
        cache = self.cache if runner is self.target else runner.new_cache(batch, context + length)
        tokens = self.tokens(1)

        def draft() -> None:
            how = draws()
            starts, lengths = [context - 1] * batch, [length] * batch
            if draft_pass.fused(cache, DraftInputs([[0]] * batch, starts, lengths, how.sampling)) is not None:
                return
            for column in range(length):
                logits = draft_pass(cache, tokens, [context - 1 + column] * batch).logits
                assert logits is not None
                how.draw(column, logits)

        return draft


def reading(draft_pass: DraftPass, tokens: int) -> Work:
    """Return a draft model's prefill of the first `tokens` tokens of one row."""
    runner = draft_pass.runner
    cache = runner.new_cache(1, tokens)
    return lambda: runner.prefill(cache, 0, [0] * tokens, 0)


def in_sequence(draft: Work, verify: Work) -> Work:
    """Return the forwards of a round: the draft, then its verifying pass."""

    def round() -> None:
        draft()
        verify()

    return round


def draft_seconds(rounds: Sequence[float], verifying: Sequence[float]) -> float:
    """Return what a draft takes: the median of round less verifying pass within the turns, 0 at least."""
    return max(0.0, median(whole - part for whole, part in zip(rounds, verifying, strict=True)))


class ForwardMeter:
    """Times verifying passes and drafts by turns.

    Args:
        target: The target's runner.
        drafters: By name; those without a draft pass cost nothing and are left out.
        batch: Sequences.
        context: Tokens of each.
        widths: Columns of the verifying passes; `length + 1` of every draft length must be among them.
        lengths: Of the drafts.
        settle: As `Turns` has it.

    Attributes:
        turns: Seconds of passes by width, and of whole rounds by (drafter, length).
    """

    def __init__(
        self,
        target: Any,
        drafters: Mapping[str, Drafter],
        batch: int,
        context: int,
        *,
        widths: Iterable[int],
        lengths: Iterable[int],
        settle: float = SETTLE,
    ) -> None:
        widths, lengths = sorted(set(widths)), sorted(set(lengths))
        bare = BareForwards(target, batch, context, max(widths))
        works: dict[int | tuple[str, int], Work] = {width: bare.verify(width) for width in widths}
        for name, drafter in drafters.items():
            if drafter.draft_pass is not None:
                for length in lengths:
                    draft = bare.draft(drafter.draft_pass, length)
                    works[name, length] = in_sequence(draft, works[length + 1])
        self.turns = Turns(works, bare.cache.device, settle)

    @property
    def seconds(self) -> dict[Any, list[float]]:
        return self.turns.seconds
