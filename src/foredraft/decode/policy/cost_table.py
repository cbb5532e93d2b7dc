"""CostTable: what a round costs on this machine, by what the round holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostTable", "Costs", "on_line", "round_ms", "steps_of"]

Floats = NDArray[np.float64]


class Costs(Protocol):
    """What rounds cost, in ms: `CostTable`, or one that a clock corrects."""

    def verify(self, batch: int, columns: int) -> float:
        """Return the cost of a round over `columns` columns of `batch` rows in all, without drafting."""
        ...

    def plain(self, batch: int) -> float:
        """Return the cost of a plain step of `batch` rows."""
        ...

    def comb(self, batch: int) -> float:
        """Return what siblings add to a round beside their columns."""
        ...

    def draft(self, drafter: str, batch: int, steps: int) -> float:
        """Return the cost of `steps` draft steps for any of the batch's rows."""
        ...

    def drafts_up_to(self, drafter: str, batch: int, steps: int) -> list[float]:
        """Return the costs of 1 to `steps` draft steps for any of the batch's rows."""
        ...

    def read(self, drafter: str, tokens: int) -> float:
        """Return the cost of reading `tokens` tokens before the first draft step, which itself reads one."""
        ...


class CostTable:
    """Costs in ms: measured ones, and lines between them. A table never changes once it is made.

    Args:
        passes: Batch -> columns in all rows together -> a round that verifies so many columns and drafts
            nothing, host work included.
        drafts: Drafter -> batch -> (first step of a draft, each further step).
        reads: Drafter -> one token more of a text that the drafter reads. Where it is missing, reading n
            tokens costs as many draft steps as a target's pass of n columns costs plain steps, on the line
            from its narrowest to its widest one.
        assumed: What is assumed of a drafter that is not in `drafts`: a draft step in plain steps.
        combs: Batch -> what siblings add to a round beside their columns; nothing where it is missing.
    """

    def __init__(
        self,
        passes: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, Mapping[int, tuple[float, float]]],
        reads: Mapping[str, float] | None = None,
        assumed: float = 0.25,
        combs: Mapping[int, float] | None = None,
    ) -> None:
        # More columns never cost less: a sample that shows otherwise was disturbed.
        self.passes = {
            batch: [(n, min(by[m] for m in by if m >= n)) for n in sorted(by)] for batch, by in passes.items()
        }
        self.drafts = {drafter: dict(by) for drafter, by in drafts.items()}
        self.reads, self.assumed = dict(reads or {}), assumed
        self.combs = sorted((combs or {}).items())
        self._verify: dict[tuple[int, int], float] = {}  # memos, because a decision asks for many costs
        self._steps: dict[tuple[str, int], list[float]] = {}

    @classmethod
    def unmeasured(cls) -> CostTable:
        """Return the table before anything was measured: a plain step is 1 ms, and columns are free."""
        return cls({1: {1: 1.0}}, {})

    def verify(self, batch: int, columns: int) -> float:
        """Return the cost of a round over `columns` columns of `batch` rows in all, without drafting.

        Widths lie on the line between measured ones; so do batches, at equally many drafted columns. Beyond
        the last measured width the last line goes on; beyond the last batch the last one serves.
        """
        if (batch, columns) not in self._verify:
            sizes, drafted = _around(self.passes, batch), columns - batch
            points = [(size, on_line(self.passes[size], size + drafted)) for size in sizes]
            self._verify[batch, columns] = on_line(points, batch)
        return self._verify[batch, columns]

    def plain(self, batch: int) -> float:
        """Return the cost of a plain step of `batch` rows."""
        return self.verify(batch, batch)

    def comb(self, batch: int) -> float:
        """Return what siblings add to a round beside their columns."""
        return on_line(self.combs, batch) if self.combs else 0.0

    def draft(self, drafter: str, batch: int, steps: int) -> float:
        """Return the cost of `steps` draft steps for any of the batch's rows."""
        if steps == 0:
            return 0.0
        if (drafter, batch) not in self._steps:
            assumed = self.assumed * self.plain(batch)
            by = self.drafts.get(drafter, {batch: (assumed, assumed)})
            points = [[(size, by[size][part]) for size in _around(by, batch)] for part in range(2)]
            self._steps[drafter, batch] = [on_line(part, batch) for part in points]
        first, further = self._steps[drafter, batch]
        return first * min(steps, 1) + further * max(steps - 1, 0)

    def drafts_up_to(self, drafter: str, batch: int, steps: int) -> list[float]:
        """Return the costs of 1 to `steps` draft steps for any of the batch's rows."""
        return [self.draft(drafter, batch, count) for count in range(1, steps + 1)]

    def read(self, drafter: str, tokens: int) -> float:
        """Return the cost of reading `tokens` tokens before the first draft step, which itself reads one."""
        if tokens < 2:
            return 0.0
        step = self.draft(drafter, 1, 1)
        if drafter in self.reads:
            return step + self.reads[drafter] * (tokens - 1)
        columns = self.passes[min(self.passes)]
        ends = columns[:: max(1, len(columns) - 1)]
        return step * on_line(ends, tokens) / columns[0][1]

    def as_dict(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return {"passes": self.passes, "drafts": self.drafts, "reads": self.reads, "combs": dict(self.combs)}


def round_ms(table: Costs, rows: Sequence[tuple[str | None, int, int]]) -> float:
    """Return the cost of a round in which each row drafts (drafter, tokens, siblings), reading left out."""
    batch = len(rows)
    drafting = sum(table.draft(drafter, batch, count) for drafter, count in steps_of(rows).items())
    beside = sum(siblings for *_, siblings in rows)
    columns = batch + sum(drafted for _, drafted, _ in rows) + beside
    return drafting + table.verify(batch, columns) + (table.comb(batch) if beside else 0.0)


def steps_of(rows: Sequence[tuple[str | None, int, int]]) -> dict[str, int]:
    """Return the draft steps of a round by drafter, of rows as `round_ms` takes them."""
    steps: dict[str, int] = {}
    for drafter, drafted, _ in rows:
        if drafter is not None and drafted:
            steps[drafter] = max(steps.get(drafter, 0), drafted)
    return steps


def _around(sizes: Iterable[int], batch: int) -> list[int]:
    """Return the measured batches next to `batch` on both sides, or the last one on one side."""
    known = sorted(sizes)
    at = bisect_left(known, batch)
    return sorted({*known[max(at - 1, 0) : at], *known[at : at + 1]} if batch not in known else {batch})


def on_line(points: list[tuple[int, float]], x: float) -> float:
    """Return y at x on the lines between rising points (x, y).

    Before the first point y stays; beyond the last one the last line goes on.
    """
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = list(pairwise(points))[at - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
