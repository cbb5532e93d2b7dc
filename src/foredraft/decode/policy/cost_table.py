"""CostTable: what a round costs on this machine; and CorrectedTable, which follows how real rounds differ.

Only ratios decide, so drafting rounds are held against plain rounds under the same load:

    factor = median(drafting rounds: seconds / cost) / median(plain rounds: seconds / cost)

Each median is the lower one of the last few rounds. Where rounds of one kind differ from it, the load has
changed, and what was seen before counts no more. The policy takes two plain rounds ever more seldom.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class CostTable:
    """Costs in ms: measured ones, and lines between them. A table never changes once it is made."""

    def __init__(
        self,
        passes: Mapping[int, Mapping[int, float]],
        drafts: Mapping[str, Mapping[int, tuple[float, float]]],
        # drafter -> one token more of a text. Where it is missing, reading n tokens costs as many draft steps
        # as a target's pass of n columns costs plain steps, on the line between its outer widths
        reads: Mapping[str, float] | None = None,
        assumed: float = 0.25,  # plain steps that a draft step costs of a drafter that is not in `drafts`
        trees: Mapping[int, float] | None = None,
    ) -> None:
        # batch -> columns of all rows -> a round that drafts nothing, host work included; more columns never
        # cost less: a sample that shows otherwise was disturbed
        self.passes = {
            batch: [(n, min(by[m] for m in by if m >= n)) for n in sorted(by)] for batch, by in passes.items()
        }
        # drafter -> batch -> (first step of a draft, each further step)
        self.drafts = {drafter: dict(by) for drafter, by in drafts.items()}
        self.reads, self.assumed = dict(reads or {}), assumed
        # batch -> what token trees add to a round beside their columns; nothing where it is missing
        self.trees = sorted((trees or {}).items())
        self._verify: dict[tuple[int, int], float] = {}  # memos, because a decision asks for many costs
        self._steps: dict[tuple[str, int], list[float]] = {}

    @classmethod
    def unmeasured(cls) -> CostTable:
        """Return the table before anything was measured: a plain step is 1 ms, and columns are free."""
        return cls({1: {1: 1.0}}, {})

    def verify(self, batch: int, columns: int) -> float:
        """Return the cost of a round over `columns` columns of `batch` rows in all, without drafting."""
        if (batch, columns) not in self._verify:
            sizes, drafted = _around(self.passes, batch), columns - batch
            points = [(size, on_line(self.passes[size], size + drafted)) for size in sizes]
            self._verify[batch, columns] = on_line(points, batch)
        return self._verify[batch, columns]

    def plain(self, batch: int) -> float:
        """Return the cost of a plain step of `batch` rows."""
        return self.verify(batch, batch)

    def tree(self, batch: int) -> float:
        """Return what token trees add to a round beside the columns of their siblings."""
        return on_line(self.trees, batch) if self.trees else 0.0

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
        return {"passes": self.passes, "drafts": self.drafts, "reads": self.reads, "trees": dict(self.trees)}


def round_ms(table: Costs, rows: Sequence[tuple[str | None, int, int]]) -> float:
    """Return the cost of a round in which each row drafts (drafter, tokens, siblings), reading left out."""
    batch = len(rows)
    drafting = sum(table.draft(drafter, batch, count) for drafter, count in steps_of(rows).items())
    leaves = sum(siblings for *_, siblings in rows)
    columns = batch + sum(drafted for _, drafted, _ in rows) + leaves
    return drafting + table.verify(batch, columns) + (table.tree(batch) if leaves else 0.0)


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
    """Return y at x on lines between rising points; y stays before the first, the last line goes on."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = list(pairwise(points))[at - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


SAMPLES = 5  # rounds that a median is taken from: two stalls among them do no harm
LEAST = 2  # rounds from which on there is a median, and rounds that show a change of load
CHANGED = 1.5  # ratio to the median from which on the load has changed
FIRST_CHECK, LAST_CHECK = 8, 256  # rounds of drafting between checks by plain rounds; each check doubles them
TEXT = 16  # unread tokens from which on a drafter reads a text, not what a few rounds wrote
FADE = 256  # rounds after which a factor that no round confirmed counts as its square root
PART = 0.05  # share of a round's cost from which on drafting, not the pass, is what the table has wrong


class TimedRound(NamedTuple):
    """A round, or the median of several."""

    ratio: float  # what it took, over its cost by the table
    part: float = 0.0  # the share of that cost that is judged: of drafting, or of reading a text for it

    @property
    def of_part(self) -> float | None:
        """What the part took over its cost by the table, if the rest took its own; None where it has none."""
        if self.part < PART:
            return None
        return max(0.0, 1 + (self.ratio - 1) / self.part)


NOTHING = TimedRound(1.0)  # is known: rounds take their cost by the table


def median_of(samples: Iterable[TimedRound]) -> TimedRound | None:
    """Return the lower median; None of fewer than LEAST samples."""
    known = sorted(samples)
    return known[(len(known) - 1) // 2] if len(known) >= LEAST else None


class Window:
    """The last rounds of one kind, under one load."""

    def __init__(self) -> None:
        self._samples: deque[TimedRound] = deque(maxlen=SAMPLES)

    @property
    def median(self) -> TimedRound | None:
        return median_of(self._samples)

    def add(self, sample: TimedRound) -> bool:
        """Add a round; return whether the last show a change of load, which forgets those before."""
        self._samples.append(sample)
        if len(self._samples) < 2 * LEAST:
            return False
        *before, one, two = self._samples
        known = median_of(before)
        assert known is not None
        slower = min(one, two).ratio > CHANGED * known.ratio
        if not slower and max(one, two).ratio >= known.ratio / CHANGED:
            return False
        self.begin(one, two)
        return True

    def begin(self, *samples: TimedRound) -> None:
        self._samples = deque(samples, SAMPLES)


@dataclass(slots=True)
class DrafterPace:
    window: Window = field(default_factory=Window)  # the last rounds
    found: TimedRound = NOTHING  # their median, in plain rounds
    at: int = 0  # when a round was last seen
    span: int = FADE  # rounds after which what was found fades

    def faded(self, now: int) -> TimedRound:
        """Return what was found: the longer no round confirmed it, the nearer its ratio to 1."""
        return self.found._replace(ratio=self.found.ratio**0.5 ** ((now - self.at) // self.span))

    def renew(self, now: int, plain: TimedRound, sample: TimedRound) -> None:
        """Begin anew after a span without rounds; the span doubles where what was found faded wrongly."""
        faded = self.faded(now)
        confirmed = sample.ratio >= faded.ratio * plain.ratio > plain.ratio
        self.span = 2 * self.span if confirmed else FADE
        self.window.begin(faded._replace(ratio=faded.ratio * plain.ratio))


class CorrectedTable:
    """A cost table, corrected by what rounds take in batches of about one size. Time is counted in rounds."""

    def __init__(self, base: CostTable) -> None:
        self.base = base
        self.verify, self.plain, self.tree = base.verify, base.plain, base.tree
        self._now = 0
        self._plain = Window()
        self._paces: dict[tuple[str, bool], DrafterPace] = {}  # by (drafter, whether it reads a text)
        self._last: DrafterPace | None = None  # of the drafter that drafted in the last rounds
        self._drafting = 0  # rounds since the last check
        self._check = FIRST_CHECK  # rounds until the next one
        self._checking = 0  # plain rounds that this check still takes

    @property
    def wants_plain(self) -> bool:
        """Whether a plain round is due, because the rounds that draft cannot be judged without one."""
        return self._checking > 0

    def misses(self, drafter: str) -> bool:
        """Return whether rounds are timed, but those in which a drafter reads no text were not judged."""
        return self._now > 0 and self.found(drafter) is NOTHING

    def found(self, drafter: str, reads: bool = False) -> TimedRound:
        """Return what rounds of a drafter take, in plain rounds, over their cost by the table."""
        pace = self._paces.get((drafter, reads))
        return NOTHING if pace is None or pace.found is NOTHING else pace.faded(self._now)

    def learn(self, drafter: str | None, sample: TimedRound, reads: bool = False) -> None:
        """Count a round; drafter: None is a plain one. The unit of ratios is the same for all rounds."""
        self._now += 1
        if drafter is None:
            self._learn_plain(sample)
        else:
            self._learn_drafting(self._paces.setdefault((drafter, reads), DrafterPace(at=self._now)), sample)
        pace, plain = self._last, self._plain.median
        if pace is not None and plain is not None and (own := pace.window.median) is not None:
            pace.found = own._replace(ratio=own.ratio / plain.ratio)

    def skip(self, rounds: int) -> None:
        """Count plain rounds that were not timed, among those that are."""
        self._now += rounds if self._now else 0

    def _learn_plain(self, sample: TimedRound) -> None:
        if self._plain.add(sample):
            for pace in self._paces.values():
                pace.window.begin()
        self._checking = max(0, self._checking - 1)
        if self._last is not None and self._now - self._last.at > FIRST_CHECK:
            self._last, self._check = None, FIRST_CHECK  # drafting has ended

    def _learn_drafting(self, pace: DrafterPace, sample: TimedRound) -> None:
        plain = self._plain.median
        if self._now - pace.at > pace.span and plain is not None:
            pace.renew(self._now, plain, sample)
        pace.at, self._last = self._now, pace
        self._drafting += 1
        if pace.window.add(sample):
            self._plain.begin()
            self._check = FIRST_CHECK
        if pace.window.median is not None and (self._plain.median is None or self._drafting >= self._check):
            self._checking, self._drafting = LEAST, 0
            self._check = min(2 * self._check, LAST_CHECK)

    def draft(self, drafter: str, batch: int, steps: int) -> float:
        """Return the cost of draft steps; below 0 where rounds are cheaper than the table's passes."""
        if not steps:
            return 0.0
        return self._corrected(self.found(drafter), drafter, batch, steps)

    def drafts_up_to(self, drafter: str, batch: int, steps: int) -> list[float]:
        found = self.found(drafter)
        if found is NOTHING:
            return self.base.drafts_up_to(drafter, batch, steps)
        return [self._corrected(found, drafter, batch, count) for count in range(1, steps + 1)]

    def _corrected(self, found: TimedRound, drafter: str, batch: int, steps: int) -> float:
        base_ms = self.base.draft(drafter, batch, steps)
        if found.of_part is not None:
            return base_ms * found.of_part
        return base_ms + (found.ratio - 1) * (base_ms + self.verify(batch, batch + steps))

    def read(self, drafter: str, tokens: int) -> float:
        factor = self.found(drafter, reads=tokens >= TEXT).of_part
        return self.base.read(drafter, tokens) * (1.0 if factor is None else factor)


Costs: TypeAlias = CostTable | CorrectedTable
