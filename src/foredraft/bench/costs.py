"""What bare forwards cost as decoding has them: v(n) of the target, c of the drafters, in plain steps.

Contract: medians of bare rounds (`bare`) in interleaved turns, after a warm-up. A `Meter` takes the turns one
by one, in the midst of what its costs are to explain: a machine that shares its memory has other costs from
one minute to the next. c is measured by drafts of one token and by the longest. All host work of a round is
missing here, which is what makes the predicted speed-up (`prediction`) that of a round without any
(docs/architecture.md, "Words").
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from foredraft.bench.bare import SETTLE, BareRounds, Work, draft_seconds, one_after_the_other
from foredraft.bench.records import Cost, Costs, DraftCost, Spread
from foredraft.bench.timing import Turns
from foredraft.decode.draft_pass import ModelDrafter
from foredraft.llm import LLM

__all__ = ["REPEATS", "WIDE", "Meter", "measure_costs"]

WIDE = (8, 16, 32)  # rows beyond the longest draft that are measured for one sequence
REPEATS = 30


class Meter:
    """Of `batch` sequences with `context` tokens each; longest: of the drafts. Warmed up when it is made."""

    def __init__(self, llm: LLM, batch: int, context: int, longest: int) -> None:
        target: Any = llm.engine.target
        self.batch, self.context, self.longest = batch, context, longest
        rows = [*range(1, longest + 2)]
        if batch == 1:
            rows += [wide for wide in WIDE if longest + 1 < wide <= target.max_queries]
        bare = BareRounds(target, batch, context, max(rows))
        works: dict[int | tuple[str, int], Work] = {wide: bare.forward(wide) for wide in rows}
        self._drafters = tuple(llm.engine.drafters)
        for name, drafter in llm.engine.drafters.items():
            if isinstance(drafter, ModelDrafter):
                for length in sorted({1, longest}):
                    draft = bare.draft(drafter.draft_pass, length)
                    works[name, length] = one_after_the_other(draft, works[length + 1])
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
        drafting = {name: self._draft_cost(name, step) for name in self._drafters}
        share = None if read_seconds is None else read_seconds / step
        return Costs(self.batch, self.context, tuple(verifying), drafting, share, workload)

    def _draft_cost(self, name: str, step: float) -> DraftCost:
        seconds, longest = self._turns.seconds, self.longest
        if (name, 1) not in seconds:
            return DraftCost(0.0, 0.0)
        first, whole = (
            draft_seconds(seconds[name, length], seconds[length + 1]) / step for length in (1, longest)
        )
        return DraftCost(first, max(0.0, whole - first) / max(1, longest - 1))


def measure_costs(
    llm: LLM,
    batch: int,
    context: int,
    longest: int,
    read_seconds: float | None = None,
    repeats: int = REPEATS,
    after: Callable[[], object] = lambda: None,
) -> Costs:
    """All at once; as `Meter` takes them. after: called after the turn that warms up, and each other one."""
    meter = Meter(llm, batch, context, longest)
    after()
    for _ in range(repeats):
        meter.turn()
        after()
    return meter.costs(read_seconds)
