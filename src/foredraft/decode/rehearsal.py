"""Rehearsal: rounds of texts that mean nothing, to be timed while nobody waits.

Contract: rounds of an engine beside the given one, over its target, cache and drafters, which must hold no
sequence; they are left as after requests that were cancelled. Times are whole rounds', host work included,
but for what it takes to weigh who drafts, which is timed apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor

from foredraft.decode.draft import as_reader, as_stepper
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy import Alone, Auto, Choice, Offers
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.cache import KVCache
from foredraft.model.device import synchronise

__all__ = ["FILLER", "Rehearsal", "Trial"]

CONTEXT = 256  # tokens of the texts, if there is room
GROWTH = 8  # long drafts, all of whose tokens are kept, by which such a text may grow
# seconds of rounds like it before one is timed, and such rounds at most: a cache that others have filled
# takes several to hold what they need
SETTLE, SETTLED = 0.005, 16
READ = 32  # tokens of the text that drafters are timed reading
READINGS = 2  # of a text, of which the quicker counts
FILLER = "filler"  # a drafter that takes no time: what its drafts cost is what verifying them does

Trial = tuple[str | None, int]  # who drafts how many tokens


class Rehearsal:
    """Of `batch` rows with drafts of up to `longest` tokens, drawn (`draws`) or greedy ones. Has the engine's
    caches while it is entered."""

    def __init__(self, engine: Engine, batch: int, longest: int, *, draws: bool = False) -> None:
        assert not engine.rows.sequences
        self.policy = _Told(longest)
        drafters: dict[str, Any] = {**engine.drafters, FILLER: _Filler()}
        self.engine = Engine(
            engine.target,
            engine.cache,
            self.policy,
            drafters,
            vocabulary=engine.vocabulary,
            device=engine.device,
            vocab_ops=engine.vocab_ops,
            greedy_drafts=engine.greedy_drafts,
        )
        self.batch, self.longest, self.draws = batch, longest, draws
        limits = [drafter.max_length for drafter in drafters.values()]
        self.most = min([engine.cache.positions, *(limit for limit in limits if limit is not None)])
        self.context: int = min(CONTEXT, self.most - 4 * (longest + 1))

    @property
    def fits(self) -> bool:
        """Whether there is room for its texts."""
        return self.context >= 2

    def __enter__(self) -> Rehearsal:
        try:
            self._seat()
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def round(self, trial: Trial, *, after_others: bool) -> float:
        """ms of a round in which all rows draft so, after others like it (`SETTLE`) or whatever was before,
        what the caches have of it included; drafters that are behind catch up before."""
        self._seat()
        drafter = None if trial[0] is None else as_reader(self.engine.drafters[trial[0]])
        rows = self.engine.rows.sequences
        behind = drafter is not None and any(len(s.tokens) - drafter.length(s) > 2 for s in rows)
        start = begun = time.perf_counter()
        for _ in range(SETTLED if after_others else behind):
            self._seat()
            self.policy.trial = trial
            self.engine.round()
            start = time.perf_counter()
            if start - begun >= SETTLE:
                break
        self.policy.trial = trial
        self.engine.round()
        return 1e3 * (time.perf_counter() - start) - self.policy.took

    @property
    def weighing(self) -> list[float]:
        """ms that it took to weigh who drafts, in each round so far that did."""
        return self.policy.weighing

    def reading(self, name: str) -> float:
        """ms that a token more takes of a text that this drafter reads, where it is a stepper; it has read
        that before. Reading at all takes about a step, which a long text pays once as well as this short
        one."""
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

    def _seat(self) -> None:
        """Rows with room for two rounds more, and texts about as long as they were."""
        rows = self.engine.rows.sequences
        if rows and all(s.remaining > 3 * (self.longest + 1) for s in rows):
            return
        self._clear()
        room = min(self.most - self.context, GROWTH * (self.longest + 1))
        for row in range(self.batch):
            prompt = [(1 + row + place) % self.engine.vocabulary for place in range(self.context)]
            params = SamplingParams(temperature=float(self.draws), max_new_tokens=room, ignore_eos=True)
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
    """Drafts as it is told, but has the cost model weigh as for a request, for the time that this takes."""

    name = "told"
    weighs = True

    def __init__(self, longest: int) -> None:
        self.trial: Trial = None, 0
        self.auto = Auto(longest)
        self.took = 0.0  # ms, in the last round
        self.weighing: list[float] = []  # of each round that drafted

    def start(self) -> Any:
        return self.auto.start()

    def rests(self, sequences: Seq[Sequence]) -> bool:
        self.took = 0.0
        return not self.trial[1]

    def choose(self, rows: Seq[Offers]) -> list[Choice]:
        start = time.perf_counter()
        real = [replace(row, most={n: k for n, k in row.most.items() if n != FILLER}) for row in rows]
        for row in rows:
            row.sequence.policy_state.made.clear()
        self.auto.choose(real)
        self.took = 1e3 * (time.perf_counter() - start)
        self.weighing.append(self.took)
        return [Choice(*self.trial) for _ in rows]

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        self.auto.learn(sequence, outcome, sure)


class _Filler:
    """A Guesser that takes no time: what its drafts cost is what verifying them does."""

    name = FILLER
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
