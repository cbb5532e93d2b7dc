"""What a round takes on this machine, by what is in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostTable"]

Floats = NDArray[np.float64]

ASSUMED = 0.25  # of a plain step: a drafter's step, while nothing was measured


class CostTable:
    """Milliseconds, of what was measured and what lies between; never changed once made.

    passes: batch -> columns in all -> of a round that verifies them and drafts nothing. drafts: drafter ->
    batch -> of the first step of its drafts, and of each further one. reads: drafter -> of a token more of a
    text that it reads; missing where that was not measured.
    """

    def __init__(
        self,
        passes: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, Mapping[int, tuple[float, float]]],
        reads: Mapping[str, float] | None = None,
    ) -> None:
        # fewer columns never take more: what was measured otherwise was disturbed
        self.passes = {
            batch: [(n, min(by[m] for m in by if m >= n)) for n in sorted(by)] for batch, by in passes.items()
        }
        self.drafts = {drafter: dict(by) for drafter, by in drafts.items()}
        self.reads = dict(reads or {})
        self._verifying: dict[tuple[int, int], float] = {}  # both as they are asked for
        self._steps: dict[tuple[str, int], tuple[float, float]] = {}
        self._passing: dict[int, Floats] = {}
        self._columns: dict[tuple[int, int], list[float]] = {}
        self._rounds: dict[tuple[str, int, int], list[float]] = {}

    @classmethod
    def assumed(cls) -> CostTable:
        """Before anything was measured: columns are free."""
        return cls({1: {1: 1.0}}, {})

    @classmethod
    def joined(cls, tables: Iterable[CostTable]) -> CostTable:
        """Of several batch sizes."""
        joined = cls({}, {})
        for table in tables:
            joined.passes |= table.passes
            joined.reads |= table.reads
            for drafter, by in table.drafts.items():
                joined.drafts[drafter] = joined.drafts.get(drafter, {}) | by
        return joined

    def verifying(self, batch: int, columns: int) -> float:
        """Of a round over so many columns of `batch` rows in all, drafting left out.

        Between measured widths it lies on the line between them, beyond on the last one's; and so between
        measured batches that draft as many columns, beyond which it is as for the last one.
        """
        found = self._verifying.get((batch, columns))
        if found is None:
            drafted = columns - batch
            near = ((b, _on_line(self.passes[b], b + drafted)) for b in _around(self.passes, batch))
            found = self._verifying[batch, columns] = _on_line(list(near), batch)
        return found

    def passing(self, batch: int, drafted: int) -> Floats:
        """Of rounds over 0, 1, ... `drafted` columns more than the rows, drafting left out."""
        found = self._passing.get(batch)
        if found is None or len(found) <= drafted:
            found = np.array([self.verifying(batch, batch + more) for more in range(drafted + 1)])
            self._passing[batch] = found
        return found[: drafted + 1]

    def rounds(self, drafter: str, batch: int, most: int) -> list[float]:
        """Of rounds in which every row drafts 1, 2, ... `most` tokens by it."""
        found = self._rounds.get((drafter, batch, most))
        if found is None:
            lengths = range(1, most + 1)
            found = [
                self.drafting(drafter, batch, k) + self.verifying(batch, batch * (1 + k)) for k in lengths
            ]
            self._rounds[drafter, batch, most] = found
        return found

    def columns(self, batch: int, most: int) -> list[float]:
        """What a row's first, second ... drafted column takes, if each row of a batch has as many; `most` of
        them, never falling.

        They are the slopes of the lower convex envelope: whoever asks whether one more column pays must not
        be held up by a step in what was measured, beyond which columns are free.
        """
        found = self._columns.get((batch, most))
        if found is None:
            points = [(j, self.verifying(batch, batch * (1 + j)) / batch) for j in range(most + 1)]
            found = self._columns[batch, most] = _slopes(points)
        return found

    def drafting(self, drafter: str, batch: int, depth: float) -> float:
        """Of `depth` steps of a drafter for any of the rows, which may be a mean."""
        if depth == 0:
            return 0.0
        first, further = self._pair(drafter, batch)
        return first * min(depth, 1) + max(depth - 1, 0) * further

    def step(self, drafter: str, batch: int) -> float:
        """Of each step but the first."""
        return self._pair(drafter, batch)[1]

    def _pair(self, drafter: str, batch: int) -> tuple[float, float]:
        steps = self._steps.get((drafter, batch))
        if steps is None:
            by = self.drafts.get(drafter)
            assumed = ASSUMED * self.verifying(batch, batch)
            pairs = [(b, by[b]) for b in _around(by, batch)] if by else [(batch, (assumed, assumed))]
            first, further = (_on_line([(b, pair[i]) for b, pair in pairs], batch) for i in range(2))
            steps = self._steps[drafter, batch] = first, further
        return steps

    def reading(self, drafter: str, tokens: int) -> float:
        """Of a text that the drafter has to read before its first step. Where that was not measured: a pass
        of its own, which takes as many of its steps as the target's of that width takes of the target's."""
        if tokens < 2:  # a step reads one more
            return 0.0
        if drafter in self.reads:
            return self.drafting(drafter, 1, 1) + self.reads[drafter] * (tokens - 1)
        return self.drafting(drafter, 1, 1) * self.verifying(1, tokens) / self.verifying(1, 1)


def _around(by: Mapping[int, object], batch: int) -> list[int]:
    """The batches that were measured and lie nearest on both sides, or the last one on one."""
    below, above = [b for b in by if b <= batch], [b for b in by if b >= batch]
    return sorted({*([max(below)] if below else []), *([min(above)] if above else [])})


def _slopes(points: list[tuple[int, float]]) -> list[float]:
    """Of the lower convex envelope of points at 0, 1, 2 ..., between each and the next."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(hull) for _ in range(x1 - x0)]


def _on_line(points: list[tuple[int, float]], x: int) -> float:
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = list(pairwise(points))[at - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
