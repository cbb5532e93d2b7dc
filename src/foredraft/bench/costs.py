"""What bare forwards cost as decoding has them: v(n) of the target, c of the drafters, in plain steps.

Contract: nothing but forwards through the runner, as the engine calls it, over a cache of their own; medians
of interleaved turns after a warm-up. A `Meter` takes the turns one by one, in the midst of what its costs are
to explain: a machine that shares its memory has other costs from one minute to the next. Each forward follows
one of its own kind, as in decoding: a plain step a plain step, a verifying pass another one, a round a round.
What a draft takes is what a round has beyond its verifying pass, so that it pays for the weights that it
drives out of the caches; c is a token's share of the longest draft. All host work of a round is missing here,
which is what makes the predicted speed-up (`prediction`) that of a round without any (docs/architecture.md,
"Words").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from foredraft.bench.records import Cost, Costs, Spread
from foredraft.bench.timing import Turns
from foredraft.decode.draft import Drafter
from foredraft.decode.draft_pass import ModelDrafter
from foredraft.llm import LLM
from foredraft.model.cache import KVCache

__all__ = ["REPEATS", "SETTLE", "WIDE", "Meter", "draft_seconds", "measure_costs", "one_after_the_other"]

WIDE = (8, 16, 32)  # rows beyond the longest draft that are measured for one sequence
REPEATS = 30
SETTLE = 1  # runs of a forward or a round just before it is timed

Work = Callable[[], object]


class Meter:
    """Of `batch` sequences with `context` tokens each; longest: of the drafts. Warmed up when it is made."""

    def __init__(self, llm: LLM, batch: int, context: int, longest: int) -> None:
        target: Any = llm.engine.target
        self.batch, self.context, self.longest = batch, context, longest
        rows = [*range(1, longest + 2)]
        if batch == 1:
            rows += [wide for wide in WIDE if longest + 1 < wide <= target.max_queries]
        cache = target.new_cache(batch, context + max(rows))
        works: dict[int | str, Work] = {wide: _forward(target, cache, context, wide) for wide in rows}
        self._drafters = tuple(llm.engine.drafters)
        for name, drafter in llm.engine.drafters.items():
            draft = _draft(drafter, target, cache, context, longest)
            if draft is not None:
                works[name] = one_after_the_other(draft, works[longest + 1])
        self._turns = Turns(works, llm.engine.device, SETTLE)
        self._turns.take(counts=False)

    def turn(self) -> None:
        """Time each forward and each round once."""
        self._turns.take()

    def costs(self, read_seconds: float | None = None, workload: str | None = None) -> Costs:
        """What all turns so far come to; one at least. read_seconds: of a step's weights at the machine's
        bandwidth. workload: in the midst of which they were taken."""
        seconds = self._turns.seconds
        step = median(seconds[1])
        verifying = []
        for rows in (key for key in seconds if isinstance(key, int)):
            spread = Spread.of(seconds[rows])
            assert spread is not None
            verifying.append(Cost(rows, spread.median / step, spread))
        passes = seconds[self.longest + 1]
        drafting = {
            name: draft_seconds(seconds[name], passes) / self.longest / step if name in seconds else 0.0
            for name in self._drafters
        }
        share = None if read_seconds is None else read_seconds / step
        return Costs(self.batch, self.context, tuple(verifying), drafting, share, workload)


def measure_costs(
    llm: LLM,
    batch: int,
    context: int,
    longest: int,
    read_seconds: float | None = None,
    repeats: int = REPEATS,
) -> Costs:
    """All at once; as `Meter` takes them."""
    meter = Meter(llm, batch, context, longest)
    for _ in range(repeats):
        meter.turn()
    return meter.costs(read_seconds)


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


def _forward(runner: Any, cache: KVCache, context: int, width: int) -> Work:
    tokens = torch.zeros(cache.rows, width, dtype=torch.int64, device=cache.device)
    starts = [context - 1] * cache.rows
    return lambda: runner.forward(cache, tokens, starts)


def _draft(drafter: Drafter, target: Any, shared: KVCache, context: int, longest: int) -> Work | None:
    """`longest` tokens of each sequence, one after the other, in one call where the engine would: only the
    first one's forward finds the weights as the target left them. shared: the target's cache, which is that
    of the target's own layers too. None where the drafter has no model."""
    if not isinstance(drafter, ModelDrafter):
        return None
    draft_pass = drafter.draft_pass
    batch, own = shared.rows, draft_pass.runner
    cache = shared if own is target else own.new_cache(batch, context + longest)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=cache.device)
    at = torch.zeros(batch, dtype=torch.int64, device=tokens.device)

    def draft() -> None:
        if draft_pass.at_once(cache, [[0]] * batch, [context - 1] * batch, [longest] * batch) is not None:
            return
        for position in range(context, context + longest):
            draft_pass(cache, tokens, [position - 1] * batch, at=at)

    return draft
