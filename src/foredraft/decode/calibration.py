"""Calibration: what rounds take on this machine, by running some while nobody waits.

Contract: rounds of an engine beside the given one, over its target, cache and drafters, which must hold no
sequence; they are left as after requests that were cancelled. No clock runs in a round of a request. Times
are whole rounds', host work included, and the least of several: what disturbs a round only ever adds to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.decode.draft import as_reader, as_stepper
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Alone, Auto, Choice, CostTable, Offers
from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache
from foredraft.model.device import synchronise

__all__ = ["Calibration", "measure"]

CONTEXT = 256  # tokens of the texts that rounds are timed on, if there is room
GROWTH = 8  # long drafts, all of whose tokens are kept, by which such a text may grow
READ = 32  # tokens of the text that drafters are timed reading
SECONDS = 0.05, 0.5  # after which no round is timed again: once two of each count, and before
ROUNDS = 8.0  # plain rounds, or as many seconds as above if that is more, after which nothing more is tried
REPEATS = 4
READINGS = 2  # of a text, of which the quicker counts
FRESH = 60.0  # seconds until a table is made anew, if nothing runs then
RARE = 200  # and rounds have taken so many times as long as it took to make
FILLER = "filler"

Trial = tuple[str | None, int]  # who drafts how many tokens


class Calibration:
    """Keeps the table of an `Auto` policy, whose `calibrate` it is.

    Tables are by batch size, powers of two up to the cache's rows, as they are met.
    """

    def __init__(self, policy: Auto) -> None:
        self.policy = policy
        self._measured: dict[int, _Measured] = {}  # by rows

    def __call__(self, engine: Engine, waiting: int) -> None:
        batch = 1
        while batch < min(waiting, engine.cache.rows):
            batch *= 2
        sizes = {1, min(batch, engine.cache.rows)}
        now, spent = time.monotonic(), self.policy.ledger.spent
        fresh = {size for size, its in self._measured.items() if now <= its.until or spent < its.due}
        stale = sorted(sizes - fresh)
        for size in stale:
            start = time.monotonic()
            table = measure(engine, size, self.policy.max_draft)
            if table is not None:
                end = time.monotonic()
                due = spent + RARE * 1e3 * (end - start)
                self._measured[size] = _Measured(table, end + FRESH, due)
        if stale and self._measured:
            self.policy.table = CostTable.joined(its.table for its in self._measured.values())


@dataclass(frozen=True, slots=True)
class _Measured:
    """A table, as good as new until that time, or until rounds have taken so many ms in all."""

    table: CostTable
    until: float
    due: float


def measure(engine: Engine, batch: int, longest: int) -> CostTable | None:
    """Rounds of `batch` rows with drafts of up to `longest` tokens; None where there is no room for them."""
    longest = min(longest, engine.target.max_queries - 1)
    bench = _Bench(engine, batch, longest)
    if bench.context < 2:
        return None
    timed = {
        name: drafter for name, drafter in engine.drafters.items() if not getattr(drafter, "free", False)
    }
    trials: list[Trial] = [
        (None, 0),
        (FILLER, longest),
    ]  # what matters most is first: time may not do for all
    trials += [(name, 1) for name in (*timed, FILLER)]
    trials += [(name, longest) for name in timed]
    trials += [(FILLER, length) for length in (2, 4) if length < longest]
    best = bench.least(trials, timed)
    passes = {batch * (1 + length): ms for (name, length), ms in best.items() if name in (None, FILLER)}
    table = CostTable({batch: passes}, {})
    drafts: dict[str, Mapping[int, tuple[float, float]]] = {}
    for name in engine.drafters:
        first = further = 0.0
        if name in timed:
            if (name, 1) not in best:
                continue
            first = further = max(0.0, best[name, 1] - table.verifying(batch, 2 * batch))
            if (name, longest) in best:
                further = best[name, longest] - best[FILLER, longest] - first
                further = max(0.0, further) / max(1, longest - 1)
        drafts[name] = {batch: (first, further)}
    return CostTable({batch: passes}, drafts, bench.reads)


class _Bench:
    """Rounds beside an engine, of `batch` texts that mean nothing."""

    def __init__(self, engine: Engine, batch: int, longest: int) -> None:
        assert not engine.rows.sequences
        self.policy = _Told()
        drafters: dict[str, Any] = {**engine.drafters, FILLER: _Filler()}
        self.engine = Engine(
            engine.target,
            engine.cache,
            self.policy,
            drafters,
            vocabulary=engine.vocabulary,
            device=engine.device,
            operators=engine.operators,
            greedy_drafts=engine.greedy_drafts,
        )
        self.batch, self.longest = batch, longest
        limits = [drafter.max_length for drafter in drafters.values()]
        self.most = min([engine.cache.positions, *(limit for limit in limits if limit is not None)])
        self.context: int = min(CONTEXT, self.most - 4 * (longest + 1))
        self.reads: dict[str, float] = {}  # of a token, in ms

    def least(self, trials: list[Trial], readers: Iterable[str]) -> dict[Trial, float]:
        """Of each, the least ms; the first time is not counted if there is time for more. Between the first
        and the second, these drafters' readings of a text are timed. What there is no time for at all is
        left out, but for the first two: a table takes about as long as `ROUNDS` plain ones, whatever the
        model."""
        best: dict[Trial, float] = {}
        try:
            self._seat()
            started = time.perf_counter()  # what it takes to touch a cache for the first time is no round's
            for repeat in range(REPEATS + 1):
                if repeat == 1:
                    self.reads = {name: self._read(name) for name in readers}
                for trial in trials:
                    taken = time.perf_counter() - started
                    if repeat and taken > SECONDS[repeat < 3]:
                        return best
                    plain = best.get((None, 0), 0.0) / 1e3
                    if len(best) >= 2 and taken > max(SECONDS[1], ROUNDS * plain):
                        return best
                    taken = self._round(trial, after_another=repeat > 0)
                    best[trial] = taken if repeat < 2 else min(best[trial], taken)
        finally:
            self._clear()
        return best

    def _read(self, name: str) -> float:
        """ms that a token more takes of a text that is read, where it is a stepper; it has read that before.
        Reading at all takes about a step, which a long text pays once as well as this short one."""
        stepper = as_stepper(self.engine.drafters[name])
        some = min(READ, self.context)
        if stepper is None:
            return 0.0
        least = [math.inf, math.inf]
        for _ in range(READINGS):
            for which, tokens in enumerate((1, some)):
                synchronise(self.engine.device)
                start = time.perf_counter()
                stepper.read(self.engine.rows.sequences[0], 0, tokens)
                synchronise(self.engine.device)
                least[which] = min(least[which], 1e3 * (time.perf_counter() - start))
        return max(0.0, least[1] - least[0]) / (some - 1)

    def _round(self, trial: Trial, *, after_another: bool) -> float:
        """ms of a round in which all rows draft so, after another like it or whatever was before, what the
        caches have of it included; drafters that are behind catch up before."""
        self._seat()
        self.policy.trial = trial
        drafter = None if trial[0] is None else as_reader(self.engine.drafters[trial[0]])
        rows = self.engine.rows.sequences
        if after_another or (drafter and any(len(s.tokens) - drafter.length(s) > 2 for s in rows)):
            self.engine.round()
        start = time.perf_counter()
        self.engine.round()
        return 1e3 * (time.perf_counter() - start)

    def _seat(self) -> None:
        """Rows with room for two rounds more, and texts about as long as they were."""
        rows = self.engine.rows.sequences
        if rows and all(s.remaining > 3 * (self.longest + 1) for s in rows):
            return
        self._clear()
        room = min(self.most - self.context, GROWTH * (self.longest + 1))
        for row in range(self.batch):
            prompt = [(1 + row + place) % self.engine.vocabulary for place in range(self.context)]
            params = SamplingParams(temperature=0, max_new_tokens=room, ignore_eos=True)
            self.engine.submit(Sequence(row, prompt, params, 0, drafters=tuple(self.engine.drafters)))
        self.policy.trial = None, 0
        scheduler = self.engine.scheduler
        scheduler.admit()
        # Nothing but its last token is read: a pass takes as long whatever the keys before it hold, which are
        # finite.
        for cache in self.engine.rows.caches:
            cache.lengths[: self.batch] = [self.context - 2] * self.batch
        while scheduler.waiting or scheduler.prefilling is not None:
            self.engine.step()

    def _clear(self) -> None:
        for sequence in list(self.engine.rows.sequences):
            self.engine.cancel(sequence)


class _Told(Alone):
    """Drafts as it is told."""

    name = "told"

    def __init__(self) -> None:
        self.trial: Trial = None, 0

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        return [Choice(*self.trial) for _ in rows]


class _Filler:
    """A Guesser that takes no time: what its drafts cost is what verifying them does."""

    name = FILLER
    free = True
    taps: tuple[int, ...] = ()
    max_length: int | None = None
    caches: tuple[KVCache, ...] = ()

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[0] * budget for _, budget in requests]

    def join(self, sequence: Sequence) -> None:
        return None

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        return None

    def leave(self, sequence: Sequence) -> None:
        return None
