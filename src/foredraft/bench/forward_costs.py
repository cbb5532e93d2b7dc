"""The costs of bare forwards: v(n) of the target and c of the drafters, in plain steps.

Contract: medians of bare forwards (`profiling.forwards`) in interleaved turns, after a warm-up. A `CostMeter`
takes the turns one by one, between the runs that its costs are to explain, because costs on a shared machine
change from one minute to the next. c is measured by drafts of one token and by the longest. Host work is not
in these costs, so the predicted speed-up (`prediction`) is that of a round without any (docs/architecture.md,
"Words").
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from foredraft.bench.bench_records import Cost, DraftCost, ForwardCosts, Spread
from foredraft.llm.loaded import Loaded
from foredraft.profiling.forwards import ForwardMeter, draft_seconds
from foredraft.profiling.others import Load, Watch

__all__ = ["REPEATS", "WIDE", "CostMeter", "measure_costs"]

WIDE = (8, 16, 32)  # columns beyond the longest draft that are measured for one sequence
REPEATS = 30  # turns of a cost that is measured by itself


class CostMeter:
    """Measures the costs of `batch` sequences of `context` tokens, with drafts of up to `longest` tokens.

    It warms up when it is made.
    """

    def __init__(self, loaded: Loaded, batch: int, context: int, longest: int) -> None:
        runner, drafters = loaded.runner, loaded.engine.drafters
        self.batch, self.context, self.longest = batch, context, longest
        widths = [*range(1, longest + 2)]
        if batch == 1:
            widths += [wide for wide in WIDE if longest + 1 < wide <= runner.max_queries]
        self._drafters = tuple(drafters)
        self._meter = ForwardMeter(runner, drafters, batch, context, widths=widths, lengths={1, longest})
        self._meter.turns.take(counts=False)
        self._loads: list[Load] = []

    def turn(self) -> None:
        """Time each forward and each round once."""
        watch = Watch()
        self._meter.turns.take()
        if (load := watch.load()) is not None:
            self._loads.append(load)

    def costs(self, read_seconds: float | None = None, workload: str | None = None) -> ForwardCosts:
        """Return the costs of all turns so far, one at least.

        Args:
            read_seconds: Time to read a step's weights at the machine's bandwidth.
            workload: Between whose runs the turns were taken.
        """
        seconds = self._meter.seconds
        step = median(seconds[1])
        verifying = []
        for rows in (key for key in seconds if isinstance(key, int)):
            spread = Spread.of(seconds[rows])
            assert spread is not None
            verifying.append(Cost(rows, spread.median / step, spread))
        drafting = {name: self._draft_cost(name, step) for name in self._drafters}
        share = None if read_seconds is None else read_seconds / step
        others = Spread.of(load.others for load in self._loads)
        return ForwardCosts(self.batch, self.context, tuple(verifying), drafting, share, workload, others)

    def _draft_cost(self, name: str, step: float) -> DraftCost:
        seconds, longest = self._meter.seconds, self.longest
        if (name, 1) not in seconds:
            return DraftCost(0.0, 0.0)
        first, whole = (
            draft_seconds(seconds[name, length], seconds[length + 1]) / step for length in (1, longest)
        )
        return DraftCost(first, max(0.0, whole - first) / max(1, longest - 1))


def measure_costs(
    loaded: Loaded,
    batch: int,
    context: int,
    longest: int,
    *,
    read_seconds: float | None = None,
    repeats: int = REPEATS,
    after: Callable[[], object] = lambda: None,
) -> ForwardCosts:
    """Measure the costs in one go; arguments as `CostMeter` and its methods have them.

    after: Called after the warm-up, and after every turn.
    """
    meter = CostMeter(loaded, batch, context, longest)
    after()
    for _ in range(repeats):
        meter.turn()
        after()
    return meter.costs(read_seconds)
