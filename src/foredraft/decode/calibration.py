"""Calibration: what rounds take on this machine, by rehearsing some while nobody waits.

Contract: no clock runs in a round of a request. A machine that is shared disturbs some rounds, and is slower
in some minutes than in others. So what counts is the median of a number of rounds, of which few are timed
before the first request, and one of each kind more whenever requests' rounds have taken `RARE` times as long;
the last `KEPT` of each kind are remembered. (The least of them would come no closer to the truth with their
number: it is the luck of one.)
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median_low

from foredraft.decode.draft import as_free
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Auto, CostTable
from foredraft.decode.rehearsal import FILLER, Rehearsal, Trial
from foredraft.decode.sequence import Sequence

__all__ = ["Calibration", "Measured"]

logger = logging.getLogger(__name__)

Kind = tuple[int, bool]  # rows, and whether tokens are drawn

SECONDS = 0.5  # after which no round is timed at first,
ROUNDS = 8.0  # plain rounds, or those seconds if they are more, after which nothing is timed
REPEATS = 6  # of each, at first,
RUNNING = 2  # so many times in a row, since it takes others before
KEPT = 12
WEIGHED = 3  # rounds that draft, which together take the host as long to choose for as to weigh one of them
RARE = 200  # times as long rounds of requests take, until one of each is timed again


class Calibration:
    """Keeps the table of an `Auto` policy, whose `calibrate` it is.

    There is one for greedy requests and one for those that draw, whose rounds take longer: as they are met,
    and by batch size, powers of two up to the cache's rows.
    """

    def __init__(self, policy: Auto) -> None:
        self.policy = policy
        self._measured: dict[Kind, Measured] = {}
        self._due: dict[Kind, float] = {}  # ms that rounds have to take until there is more to measure
        self._tables: dict[bool, CostTable] = {}

    def __call__(self, engine: Engine, waiting: Seq[Sequence]) -> None:
        draws = any(sequence.params.temperature > 0 for sequence in waiting)
        batch = 1
        while batch < min(len(waiting), engine.cache.rows):
            batch *= 2
        spent = self.policy.ledger.spent
        kinds = [(size, draws) for size in sorted({1, min(batch, engine.cache.rows)})]
        due = [kind for kind in kinds if spent >= self._due.get(kind, 0.0)]
        for kind in due:
            if kind not in self._measured:
                self._measured[kind] = Measured.of(engine, *kind, self.policy.max_draft)
            start = time.perf_counter()
            try:
                self._measured[kind].take(engine)
            except (MemoryError, RuntimeError) as error:  # a request that meets it will say so itself
                logger.warning("costs of %d rows could not be measured: %s", kind[0], error)
            self._due[kind] = spent + RARE * 1e3 * (time.perf_counter() - start)
        made = (measured.table() for (_, drew), measured in self._measured.items() if drew == draws)
        if due and (tables := [table for table in made if table is not None]):
            self._tables[draws] = CostTable.joined(tables)
        self.policy.table = self._tables.get(draws, self.policy.table)


@dataclass
class Measured:
    """Rounds of `batch` rows with drafts of up to `longest` tokens, drawn (`draws`) or greedy ones. drafters:
    whether one takes time at all. rounds: ms of each kind. reads: of each drafter that does, ms that a token
    more takes of a text that it reads. weighing: ms that it takes to weigh who drafts."""

    batch: int
    draws: bool
    longest: int
    drafters: dict[str, bool]
    rounds: dict[Trial, deque[float]] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)
    weighing: deque[float] = field(default_factory=lambda: deque(maxlen=6 * KEPT))
    begun: int = 0  # times that it was told to take some

    @classmethod
    def of(cls, engine: Engine, batch: int, draws: bool, longest: int) -> Measured:
        """Nothing yet."""
        drafters = {name: as_free(drafter) is None for name, drafter in engine.drafters.items()}
        return cls(batch, draws, min(longest, engine.target.max_queries - 1), drafters)

    @property
    def timed(self) -> list[str]:
        """The drafters that take time."""
        return [name for name, takes_time in self.drafters.items() if takes_time]

    @property
    def trials(self) -> list[Trial]:
        """What matters most is first, since time may not do for all."""
        trials: list[Trial] = [(None, 0), (FILLER, self.longest)]
        trials += [(name, 1) for name in (*self.timed, FILLER)]
        trials += [(name, self.longest) for name in self.timed]
        return trials + [(FILLER, length) for length in (2, 4) if length < self.longest]

    def take(self, engine: Engine) -> None:
        """Time some rounds more, if there is room for them."""
        rehearsal = Rehearsal(engine, self.batch, self.longest, draws=self.draws)
        if not rehearsal.fits:
            return
        with rehearsal:
            if self.begun:
                self._once(rehearsal)
            else:
                self._first(rehearsal)
        self.weighing += rehearsal.weighing
        self.begun += 1

    def _first(self, rehearsal: Rehearsal) -> None:
        """The first time of each is not counted if there is time for more. Between the first and the second,
        these drafters' readings of a text are timed. What there is no time for at all is left out, but for
        the first two: it takes about as long as `ROUNDS` plain ones, whatever the model."""
        started = time.perf_counter()  # what it takes to touch a cache for the first time is no round's
        for repeat in range(REPEATS + 1):
            if repeat == 1:
                self.reads = {name: rehearsal.reading(name) for name in self.timed}
            for trial in self.trials:
                taken = time.perf_counter() - started
                if (repeat and taken > SECONDS) or (len(self.rounds) >= 2 and self._long(taken)):
                    return
                times = [rehearsal.round(trial, after_others=repeat > 0)]
                if repeat:
                    times += [rehearsal.round(trial, after_others=False) for _ in range(1, RUNNING)]
                if repeat < 2:
                    self.rounds[trial] = deque(maxlen=KEPT)
                self.rounds[trial] += times

    def _once(self, rehearsal: Rehearsal) -> None:
        """Each once, as far as there is time; who begins takes turns."""
        trials, started = self.trials, time.perf_counter()
        turn = self.begun % len(trials)
        for trial in trials[turn:] + trials[:turn]:
            if self._long(time.perf_counter() - started):
                return
            ms = rehearsal.round(trial, after_others=True)
            self.rounds.setdefault(trial, deque(maxlen=KEPT)).append(ms)

    def _long(self, taken: float) -> bool:
        plain = median_low(self.rounds[None, 0]) / 1e3 if (None, 0) in self.rounds else 0.0
        return taken > max(SECONDS, ROUNDS * plain)

    def table(self) -> CostTable | None:
        """What follows; None where nothing could be timed."""
        if not self.rounds:
            return None
        batch, longest = self.batch, self.longest
        typical = {trial: median_low(several) for trial, several in self.rounds.items()}
        passes = {
            batch * (1 + length): ms for (name, length), ms in typical.items() if name in (None, FILLER)
        }
        table = CostTable({batch: passes}, {})  # but for choosing
        drafts: dict[str, Mapping[int, tuple[float, float]]] = {}
        for name, takes_time in self.drafters.items():
            first = further = 0.0
            if takes_time:
                if (name, 1) not in typical:
                    continue
                first = further = max(0.0, typical[name, 1] - table.verifying(batch, 2 * batch))
                if (name, longest) in typical:
                    whole = max(0.0, typical[name, longest] - typical[FILLER, longest])
                    further = max(0.0, whole - first) / max(1, longest - 1)
                    if further > first:  # it reads what is new besides: to seem cheaper, it was disturbed
                        first = further = whole / longest
            drafts[name] = {batch: (first, further)}
        choosing = median_low(self.weighing) / WEIGHED if self.weighing else 0.0
        chosen = {columns: ms + choosing * (columns > batch) for columns, ms in passes.items()}
        return CostTable({batch: chosen}, drafts, self.reads)
