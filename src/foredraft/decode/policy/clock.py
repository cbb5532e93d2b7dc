"""Clock: what rounds really take beside the costs of a table.

A table may be wrong: it was measured while other programs ran, or it lacks what a drafter's host work takes.
Only ratios decide, so drafting rounds are held against plain rounds under the same load:

    factor = level(drafting rounds: seconds / cost) / level(plain rounds: seconds / cost)

A level is the lower median of the last few rounds, so stalls of single rounds do not move it. Where rounds of
one kind change their level, the load has changed, and what was seen before counts no more. Drafting goes on
without plain rounds, so the policy takes two: soon after it began, then ever more seldom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from foredraft.decode.policy.cost_table import CostTable

__all__ = ["LEAST", "TEXT", "Clock", "ClockedTable", "TimedRound"]

SAMPLES = 5  # rounds that a level is taken from: two stalls among them do no harm
LEAST = 2  # rounds from which on there is a level, and rounds that show a change of load
CHANGED = 1.5  # ratio of levels from which on the load has changed
FIRST_CHECK, LAST_CHECK = 8, 256  # rounds of drafting between checks by plain rounds; each check doubles them
TEXT = 16  # unread tokens from which on a drafter reads a text, not what a few rounds wrote
FADE = 256  # rounds after which a factor that no round confirmed counts as its square root
PART = 0.05  # share of a round's cost from which on drafting, not the pass, is what the table has wrong


class TimedRound(NamedTuple):
    """A round, or the level of several.

    Attributes:
        ratio: What it took, over its cost by the table.
        part: The share of that cost that is judged: of drafting, or of reading a text for it.
    """

    ratio: float
    part: float = 0.0

    @property
    def of_part(self) -> float | None:
        """What the part took over its cost by the table, if the rest took its own; None where it has none."""
        if self.part < PART:
            return None
        return max(0.0, 1 + (self.ratio - 1) / self.part)


NOTHING = TimedRound(1.0)  # is known: rounds take their cost by the table


def level(samples: Iterable[TimedRound]) -> TimedRound | None:
    """Return the lower median; None of fewer than LEAST samples."""
    known = sorted(samples)
    return known[(len(known) - 1) // 2] if len(known) >= LEAST else None


class Window:
    """The last rounds of one kind, under one load."""

    def __init__(self) -> None:
        self._samples: deque[TimedRound] = deque(maxlen=SAMPLES)

    @property
    def level(self) -> TimedRound | None:
        """The level of the rounds; None where they are too few."""
        return level(self._samples)

    def add(self, sample: TimedRound) -> bool:
        """Add a round; return whether the last show a change of load, which forgets those before."""
        self._samples.append(sample)
        if len(self._samples) < 2 * LEAST:
            return False
        *before, one, two = self._samples
        known = level(before)
        assert known is not None
        slower = min(one, two).ratio > CHANGED * known.ratio
        if not slower and max(one, two).ratio >= known.ratio / CHANGED:
            return False
        self.begin(one, two)
        return True

    def begin(self, *samples: TimedRound) -> None:
        """Forget all rounds but the given ones."""
        self._samples = deque(samples, SAMPLES)


@dataclass(slots=True)
class DrafterPace:
    """What rounds of one drafter take.

    Attributes:
        window: The last rounds.
        found: Their level, in plain rounds.
        at: When a round was last seen.
        span: Rounds after which what was found fades.
    """

    window: Window = field(default_factory=Window)
    found: TimedRound = NOTHING
    at: int = 0
    span: int = FADE

    def faded(self, now: int) -> TimedRound:
        """Return what was found: the longer no round confirmed it, the nearer its ratio to 1."""
        return self.found._replace(ratio=self.found.ratio**0.5 ** ((now - self.at) // self.span))

    def renew(self, now: int, base: TimedRound, sample: TimedRound) -> None:
        """Begin anew after a span without rounds: what was found, faded, counts as one of them.

        The span doubles where the new round shows that it faded wrongly.
        """
        faded = self.faded(now)
        confirmed = sample.ratio >= faded.ratio * base.ratio > base.ratio
        self.span = 2 * self.span if confirmed else FADE
        self.window.begin(faded._replace(ratio=faded.ratio * base.ratio))


class Clock:
    """What rounds take at one cost table and one size of batch. Time is counted in rounds."""

    def __init__(self) -> None:
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
        """Return what rounds of a drafter take, in plain rounds, over their cost by the table.

        Args:
            drafter: Its name.
            reads: Of rounds in which it first reads a text; their rest costs what is known of it.
        """
        pace = self._paces.get((drafter, reads))
        return NOTHING if pace is None or pace.found is NOTHING else pace.faded(self._now)

    def learn(self, drafter: str | None, sample: TimedRound, reads: bool = False) -> None:
        """Count a round; drafter: None is a plain one. The unit of ratios is the same for all rounds."""
        self._now += 1
        if drafter is None:
            self._learn_plain(sample)
        else:
            self._learn_drafting(self._paces.setdefault((drafter, reads), DrafterPace(at=self._now)), sample)
        if self._last is not None:
            self._judge(self._last)

    def _learn_plain(self, sample: TimedRound) -> None:
        if self._plain.add(sample):
            for pace in self._paces.values():
                pace.window.begin()
        self._checking = max(0, self._checking - 1)
        if self._last is not None and self._now - self._last.at > FIRST_CHECK:
            self._last, self._check = None, FIRST_CHECK  # drafting has ended

    def _learn_drafting(self, pace: DrafterPace, sample: TimedRound) -> None:
        base = self._plain.level
        if self._now - pace.at > pace.span and base is not None:
            pace.renew(self._now, base, sample)
        pace.at, self._last = self._now, pace
        self._drafting += 1
        if pace.window.add(sample):
            self._plain.begin()
            self._check = FIRST_CHECK
        if pace.window.level is not None and (self._plain.level is None or self._drafting >= self._check):
            self._checking, self._drafting = LEAST, 0
            self._check = min(2 * self._check, LAST_CHECK)

    def _judge(self, pace: DrafterPace) -> None:
        """Hold rounds of a drafter against plain ones."""
        own, base = pace.window.level, self._plain.level
        if own is not None and base is not None:
            pace.found = own._replace(ratio=own.ratio / base.ratio)


class ClockedTable:
    """A cost table in which rounds that draft cost what the clock found, in units of its plain steps.

    What a round takes beyond the table counts as drafting: in proportion to its cost by the table, or
    where that is little, as much for every draft. In a round that first reads a text, it counts as reading.
    """

    def __init__(self, table: CostTable, clock: Clock) -> None:
        self.told, self.clock = table, clock
        self.verify, self.plain, self.comb = table.verify, table.plain, table.comb

    def draft(self, drafter: str, batch: int, steps: int) -> float:
        """Return the cost of `steps` draft steps for any of the batch's rows.

        It is negative where rounds are cheaper than passes of their width, as the table has them.
        """
        if not steps:
            return 0.0
        return self._corrected(self.clock.found(drafter), drafter, batch, steps)

    def drafts_up_to(self, drafter: str, batch: int, steps: int) -> list[float]:
        """Return the costs of 1 to `steps` draft steps for any of the batch's rows."""
        found = self.clock.found(drafter)
        if found is NOTHING:
            return self.told.drafts_up_to(drafter, batch, steps)
        return [self._corrected(found, drafter, batch, count) for count in range(1, steps + 1)]

    def _corrected(self, found: TimedRound, drafter: str, batch: int, steps: int) -> float:
        told = self.told.draft(drafter, batch, steps)
        if found.of_part is not None:
            return told * found.of_part
        return told + (found.ratio - 1) * (told + self.verify(batch, batch + steps))

    def read(self, drafter: str, tokens: int) -> float:
        """Return the cost of reading `tokens` tokens before the first draft step, which itself reads one."""
        factor = self.clock.found(drafter, reads=tokens >= TEXT).of_part
        return self.told.read(drafter, tokens) * (1.0 if factor is None else factor)
