"""Samples: the least times of every cost, gathered until two of them agree, of those that are not known well
yet.

On a shared machine samples are too long, never too short: the least is the cost, if the second least agrees.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from foredraft.decode.drafter import AutoregressiveDrafter
from foredraft.decode.engine import Engine
from foredraft.profiling.host import host_ms, whole_round_ms
from foredraft.profiling.timing import ForwardMeter, TimedTurns, reading, timed

AGREEMENT = 1.1  # ratio of the two least samples up to which they agree


def agreed(samples: Sequence[float]) -> float | None:
    """Return the least sample, or None unless the second least agrees with it."""
    least = sorted(samples)[:2]
    return least[0] if len(least) == 2 and least[1] <= AGREEMENT * least[0] else None


class Samples:
    """The two least samples of each cost, in ms."""

    def __init__(self, least: Mapping[str, Iterable[float]] | None = None) -> None:
        self.least = {cost: sorted(samples)[:2] for cost, samples in (least or {}).items()}

    def add(self, cost: str, samples: Iterable[float]) -> None:
        self.least[cost] = sorted([*self.least.get(cost, []), *samples])[:2]

    def ms(self, cost: str) -> float | None:
        """Return the least sample of a cost; None where there is none."""
        samples = self.least.get(cost)
        return samples[0] if samples else None

    def steady(self, cost: str) -> float | None:
        """Return the least sample of a cost if two agree, else None."""
        return agreed(self.least.get(cost, []))

    @classmethod
    def from_json(cls, values: Any) -> Samples:
        """Return the samples whose `least` was kept; what is none is left out, to be measured again."""
        kept = values.items() if isinstance(values, dict) else ()
        return cls({cost: samples for cost, samples in kept if _are_times(samples)})


def _are_times(samples: Any) -> bool:
    return isinstance(samples, list) and all(
        isinstance(ms, int | float) and 0 <= ms <= sys.float_info.max for ms in samples
    )


WIDTHS = (1, 2, 3, 5, 9)  # columns of a row whose passes are timed, besides the longest draft's
DRAFT = 4  # tokens of the drafts that are timed, besides drafts of one: long ones take long
CONTEXT = 256  # tokens of each timed sequence
READ = 64  # tokens that a draft model is timed reading
TURNS = 6, 12  # samples of each cost, at least and at most
LIMIT_SECONDS = 1.0  # for the samples of one batch, or of reading; the last two are for slow models
LIMIT_FIRST = 0.2  # for the runs of one work that say how long a sample takes
LIMIT_STEPS = 60  # plain steps whose time is the limit if it is longer: about three samples of each cost
LIMIT_READS = 10  # reads whose time is the limit if it is longer: about three samples


class Forwards:
    """The forwards of a batch that are timed: passes by width, and rounds by (drafter, drafted tokens)."""

    def __init__(self, engine: Engine, batch: int, longest: int) -> None:
        self.engine, self.batch, self.draft = engine, batch, min(DRAFT, longest)
        self.context = max(2, min(CONTEXT, engine.cache.positions - longest - 1))
        # columns of a row whose passes are timed
        self.widths = sorted({*(w for w in WIDTHS if w <= longest + 1), 2, self.draft + 1, longest + 1})
        rounds = [
            (name, length)
            for name, drafter in engine.drafters.items()
            if drafter.draft_pass is not None
            for length in sorted({1, self.draft})
        ]
        self.costs: dict[Any, str] = {n: f"pass of {batch} x {n}" for n in self.widths}  # by work
        self.costs |= {(name, length): f"{name} of {batch} x {length}" for name, length in rounds}

    def measure(self, samples: Samples, deadline: float) -> bool:
        """Take samples of what is not steady; return whether any was taken."""
        missing = [work for work, cost in self.costs.items() if samples.steady(cost) is None]
        if not missing or (self.batch > 1 and time.perf_counter() >= deadline):
            return False
        turns = ForwardMeter(
            self.engine.target, self.engine.drafters, self.batch, self.context,
            widths=self.widths, lengths={1, self.draft}, settle=0.0,
        ).turns  # fmt: skip
        turns.keep({1, *missing})
        _take_turns(turns, 1, LIMIT_STEPS, deadline)
        for work, seconds in turns.seconds.items():
            samples.add(self.costs[work], [1e3 * each for each in seconds])
        return True

    def ms(self, samples: Samples) -> dict[Any, float | None]:
        """Return work -> ms; None where there is no sample."""
        return {work: samples.ms(cost) for work, cost in self.costs.items()}

    def steady(self, samples: Samples) -> list[bool]:
        """Return of each cost whether two samples agree."""
        return [samples.steady(cost) is not None for cost in self.costs.values()]


class HostWork:
    """The host work of rounds by batch, greedy and sampled: plain, longest drafts, token trees of these."""

    def __init__(self, engine: Engine, longest: int) -> None:
        self.engine, self.longest = engine, longest
        self.siblings = min(longest, engine.target.max_queries - 1 - longest)  # of one pass
        autoregressive = any(
            isinstance(drafter, AutoregressiveDrafter) for drafter in engine.drafters.values()
        )
        if not (autoregressive and engine.target.takes_leaves):
            self.siblings = 0
        self.batches: list[int] = []  # those that were asked for
        self.sound = True  # every round that was tried could be timed

    def measure(self, batch: int, samples: Samples, deadline: float) -> bool:
        """Take a sample of what has none; return whether any was tried."""
        self.batches.append(batch)
        tried = False
        for draws in (False, True):
            works: list[tuple[str, Callable[..., float | None], tuple[int, ...]]] = [
                *((cost, host_ms, (length,)) for length, cost in self._costs(batch, draws).items()),
                *((cost, whole_round_ms, (self.longest, n)) for n, cost in self._trees(batch, draws).items()),
            ]
            for cost, measure, shape in works:
                if samples.ms(cost) is None and time.perf_counter() < deadline:
                    took, tried = measure(self.engine, batch, *shape, draws=draws, until=deadline), True
                    self.sound &= took is not None
                    if took is not None:
                        samples.add(cost, [took])
        return tried

    def ms(self, samples: Samples, *, draws: bool) -> dict[int, tuple[float, ...]]:
        """Return batch -> ms of a plain round and of the longest draft's: 0, where it is not known."""
        return {
            batch: tuple(samples.ms(cost) or 0.0 for cost in self._costs(batch, draws).values())
            for batch in self.batches
        }

    def tree_ms(
        self, samples: Samples, passes: Mapping[int, Mapping[int, float]], *, draws: bool
    ) -> dict[int, float]:
        """Return batch -> ms that a token tree of the longest draft adds to its round beside its columns."""
        found = {}
        for batch, (plain, drafting) in self.ms(samples, draws=draws).items():
            known = [samples.ms(cost) for cost in self._trees(batch, draws).values()]
            by_width = passes.get(batch, {})
            if known and None not in known and {1, self.longest + 1} <= by_width.keys():
                chain, tree = (ms or 0.0 for ms in known)
                line = by_width[self.longest + 1] - by_width[1] + max(0.0, drafting - plain)
                found[batch] = max(0.0, tree - chain - line * self.siblings / self.longest)
        return found

    def steady(self, samples: Samples) -> list[bool]:
        """Return of each cost whether it has a sample, the least of a run's rounds, or none can be had."""
        kinds = [(batch, draws) for batch in self.batches for draws in (False, True)]
        named = [each for kind in kinds for each in (self._costs(*kind), self._trees(*kind))]
        costs = [cost for each in named for cost in each.values()]
        return [samples.ms(cost) is not None or not self.sound for cost in costs]

    def _costs(self, batch: int, draws: bool) -> dict[int, str]:
        """Return drafted tokens -> the name of the cost among the samples."""
        kind = "sampled" if draws else "greedy"
        return {length: f"host of {batch} x {length}, {kind}" for length in (0, self.longest)}

    def _trees(self, batch: int, draws: bool) -> dict[int, str]:
        """Return siblings -> the name of the cost of a whole round; empty where there are none."""
        kind = "sampled" if draws else "greedy"
        counts = (0, self.siblings) if self.siblings > 0 else ()
        return {count: f"round of {batch} x {self.longest} + {count}, {kind}" for count in counts}


class Reading:
    """What the draft models, which read texts in a cache of their own, take for a token more."""

    def __init__(self, engine: Engine) -> None:
        passes = {name: drafter.draft_pass for name, drafter in engine.drafters.items()}
        self.device = engine.device
        self.readers = {
            name: own for name, own in passes.items() if own is not None and own.runner is not engine.target
        }

    def ms(self, samples: Samples) -> dict[str, float]:
        """Return drafter -> ms, of those whose samples are steady."""
        found: dict[str, float] = {}
        for name in self.readers:
            one, many = (samples.steady(self._cost(name, tokens)) for tokens in (1, READ))
            if one is not None and many is not None:
                found[name] = max(0.0, many - one) / (READ - 1)
        return found

    def measure(self, samples: Samples, deadline: float) -> bool:
        """Take samples of what is not steady; return whether any was taken."""
        known = self.ms(samples)
        works = {
            (name, tokens): reading(own, tokens)
            for name, own in self.readers.items()
            if name not in known
            for tokens in (1, READ)
        }
        if not works or time.perf_counter() >= deadline:
            return False
        turns = TimedTurns(works, self.device, 0.0)
        _take_turns(turns, max(works, key=lambda work: work[1]), LIMIT_READS, deadline)
        for (name, tokens), seconds in turns.seconds.items():
            samples.add(self._cost(name, tokens), [1e3 * each for each in seconds])
        return True

    def steady(self, samples: Samples) -> list[bool]:
        """Return of each draft model whether its samples are steady."""
        known = self.ms(samples)
        return [name in known for name in self.readers]

    def _cost(self, name: str, tokens: int) -> str:
        return f"reading of {name} x {tokens}"


def _take_turns(turns: TimedTurns, unit: object, count: int, deadline: float) -> None:
    """Take turns until every work is steady, for LIMIT_SECONDS, or as long as `count` runs of `unit`."""
    started, least = time.perf_counter(), math.inf
    for run in range(4):
        if run == 0 or time.perf_counter() < min(started + LIMIT_FIRST, deadline):
            least = min(least, timed(turns.works[unit], turns.device)[0])
    until = min(time.perf_counter() + max(LIMIT_SECONDS, count * least), deadline)
    turns.take(until=until)
    if time.perf_counter() < until:  # else these samples are all there are
        for samples in turns.seconds.values():
            samples.clear()  # touching a cache for the first time takes long
    turns.seconds[unit].append(least)
    for turn in range(1, TURNS[1] + 1):
        turns.take(until=until)
        if turn >= TURNS[0] and None not in map(agreed, turns.seconds.values()):
            return
        if time.perf_counter() >= until:
            return
