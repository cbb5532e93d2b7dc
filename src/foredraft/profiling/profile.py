"""The cost profile: the tables by which policy `auto` decides, measured for a machine and a model.

It is measured while no sequence has a row, and kept under a key that names the machine, the model, the dtype
and the threads. On a shared machine samples are too long, never too short: the least is the cost, if the
second least agrees; costs that are not steady are taken again by the next processes, REPEATS times. Measuring
ends after BUDGET_SECONDS: the rest is assumed, and what decoding takes corrects it. Where measuring fails,
every request still decodes.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft import user_cache
from foredraft.decode.drafter import AutoregressiveDrafter, Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.kernels.compilation import describe_cpu
from foredraft.profiling.host import host_ms, whole_round_ms
from foredraft.profiling.timing import TimedTurns, forward_turns, reading, timed

AGREEMENT = 1.1  # ratio of the two least samples up to which they agree


def agreed(samples: Sequence[float]) -> float | None:
    """Return the least sample, or None unless the second least agrees with it."""
    least = sorted(samples)[:2]
    return least[0] if len(least) == 2 and least[1] <= AGREEMENT * least[0] else None


class Samples:
    """The two least samples of each cost, in ms."""

    def __init__(self, least: Mapping[str, Iterable[float]] | None = None, repeats: int = 0) -> None:
        self.least = {cost: sorted(samples)[:2] for cost, samples in (least or {}).items()}
        self.repeats = repeats  # processes that measured only costs which had samples, and were not steady

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

        def sound(samples: Any) -> bool:
            most, times = sys.float_info.max, isinstance(samples, list)
            return times and all(isinstance(ms, int | float) and 0 <= ms <= most for ms in samples)

        kept = values if isinstance(values, dict) else {}
        least, repeats = kept.get("least"), kept.get("repeats")
        return cls(
            {cost: samples for cost, samples in least.items() if sound(samples)}
            if isinstance(least, dict)
            else {},
            repeats if isinstance(repeats, int) else 0,
        )

    def to_json(self) -> dict[str, Any]:
        return {"least": self.least, "repeats": self.repeats}


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
        if not missing or time.perf_counter() >= deadline:
            return False
        turns = forward_turns(
            self.engine.target, self.engine.drafters, self.batch, self.context,
            widths=self.widths, lengths={1, self.draft}, settle=0.0,
        )  # fmt: skip
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
        autoregressive = (isinstance(each, AutoregressiveDrafter) for each in engine.drafters.values())
        if not (engine.target.takes_leaves and any(autoregressive)):
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
        self.device = engine.device
        self.readers = {
            name: own
            for name, drafter in engine.drafters.items()
            if (own := drafter.draft_pass) is not None and own.runner is not engine.target
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


logger = logging.getLogger(__name__)

FORMAT = 9  # of kept profiles; raised when what is measured changes, or the speed of the kernels
ASSUMED_PASS = 2.0  # plain steps: most that one row's pass over its longest draft costs where samples scatter
BUDGET_SECONDS = 3.0  # for all measuring: a load must not wait longer; only the work that runs then ends
BUDGET_AGAIN = 1.0  # the same at later starts, which have costs to begin with
REPEATS = 3  # starts at most that measure again what was not steady: on a busy machine it never will be


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of rounds on this machine."""

    greedy: CostTable  # of rounds at temperature 0
    sampled: CostTable  # of rounds that draw tokens
    doubt: str | None = None  # why not all costs are believed; None where all were measured and steady
    seconds: float = 0.0  # time that measuring took; 0 where all costs were kept


def use_profile(
    engine: Engine,
    progress: Callable[[int, int], None] = lambda done, total: None,
    policy: Policy | None = None,
) -> float:
    """Give a policy the costs of this machine, if it decides by costs and has none yet."""
    policy = policy or engine.policy
    if not isinstance(policy, Auto) or policy.measured:
        return 0.0
    try:
        profile = load_profile(engine, policy.max_draft, progress)
    except Exception:  # whatever a forward raises: the request that follows may well decode
        logger.warning(
            "the costs of this machine could not be measured, so policy auto assumes them", exc_info=True
        )
        policy.use(CostTable.unmeasured())
        return 0.0
    policy.use(profile.greedy, profile.sampled)
    return profile.seconds


def load_profile(engine: Engine, longest: int, progress: Callable[[int, int], None]) -> Profile:
    """Return the profile of this engine and machine: by kept samples, and new ones of what is not steady."""
    key = _key(engine, longest)
    samples = Samples.from_json(user_cache.read("profiles", key))
    is_new = not samples.least
    profile = measure_profile(engine, longest, progress, samples)
    if profile.seconds:
        user_cache.write("profiles", key, samples.to_json())
    if profile.doubt is not None and is_new:
        logger.warning(
            "not all costs of this machine are known, because %s; policy auto goes on with those that were"
            " measured, assumes the rest, and corrects them by what its rounds take",
            profile.doubt,
        )
    return profile


def _key(engine: Engine, longest: int) -> dict[str, Any]:
    """Return everything that costs depend on: machine, threads, models, drafters, rows and draft length."""
    device = engine.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else [*describe_cpu()]
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "machine": [device.type, where, torch.get_num_threads()],
        "target": _runner(engine.target),
        "drafters": {
            name: None if (draft := drafter.draft_pass) is None else [_runner(draft.runner), draft.described]
            for name, drafter in engine.drafters.items()
        },
        "rows": engine.cache.rows,
        "longest": longest,
    }


def _runner(runner: Any) -> list[str]:
    return [repr(runner.decoder.spec), runner.choices]


def measure_profile(
    engine: Engine,
    longest: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    samples: Samples | None = None,
) -> Profile:
    """Measure what rounds of one row, and of as many rows as the cache has, cost."""
    samples = Samples() if samples is None else samples
    started = time.perf_counter()
    budget, before = BUDGET_AGAIN if samples.least else BUDGET_SECONDS, len(samples.least)
    deadline = started + budget if samples.repeats < REPEATS else -math.inf
    longest = min(longest, engine.target.max_queries - 1)
    batches = sorted({1, engine.cache.rows})
    forwards = [Forwards(engine, batch, longest) for batch in batches]
    host, reading = HostWork(engine, longest), Reading(engine)
    measured = False
    for done, each in enumerate(forwards):
        progress(done, len(batches))
        measured |= each.measure(samples, deadline)
        if each.ms(samples)[1] is not None:  # else the costs of one row serve
            measured |= host.measure(each.batch, samples, deadline)
    measured |= reading.measure(samples, deadline)
    progress(len(batches), len(batches))
    seconds = time.perf_counter() - started if measured else 0.0
    samples.repeats += measured and len(samples.least) == before
    steady = [known for each in forwards for known in each.steady(samples)]
    steady += [*host.steady(samples), *reading.steady(samples)]
    doubt = _doubt(seconds, budget, steady, host.sound)
    # batch -> columns of a row -> ms, and drafter -> batch -> ms of the first and of a further step
    passes: dict[int, dict[int, float]] = {}
    drafts: dict[str, dict[int, tuple[float, float]]] = {}
    for each in forwards:
        if each.batch not in host.batches:
            continue
        ms = each.ms(samples)
        passes[each.batch] = {width: known for width in each.widths if (known := ms[width]) is not None}
        for name, drafter in engine.drafters.items():
            if (steps := _draft_cost(ms, name, drafter, each.draft)) is not None:
                drafts.setdefault(name, {})[each.batch] = steps
    if doubt is not None:
        passes = _bounded(passes, longest)
    reads = reading.ms(samples)  # these draw no tokens, as drafts

    def table(draws: bool) -> CostTable:
        known = _with_host(passes, host.ms(samples, draws=draws), longest)
        return CostTable(known, drafts, reads, trees=host.tree_ms(samples, passes, draws=draws))

    return Profile(table(draws=False), table(draws=True), doubt, seconds)


def _bounded(passes: dict[int, dict[int, float]], longest: int) -> dict[int, dict[int, float]]:
    """Return passes none of which is dearer than where a token more a row takes `column` ms.

    Samples may agree and still be disturbed, and without this a policy might never draft, and so never learn.
    """
    column = (ASSUMED_PASS - 1) * passes[1][1] / longest
    return {
        batch: {
            n: min(by_width.get(n, math.inf), by_width[1] + batch * column * (n - 1))
            for n in sorted({*by_width, longest + 1})
        }
        for batch, by_width in passes.items()
    }


def _doubt(seconds: float, budget: float, steady: Sequence[bool], sound: bool) -> str | None:
    """Return why costs are not believed; None where they are."""
    if all(steady):
        return None if sound else "the model's logits are not finite on the texts that are timed"
    few = f"{steady.count(True)} of {len(steady)} costs were steady"
    if seconds >= budget:
        return f"measuring was cut short after {budget:g} s, when {few}"
    return f"only {few}, as where other programs run beside"


def _draft_cost(
    ms: dict[Any, float | None], name: str, drafter: Drafter, length: int
) -> tuple[float, float] | None:
    """Return (first step, further step) in ms, of timed rounds that draft 1 and `length`, or None."""
    if drafter.draft_pass is None:
        return 0.0, 0.0

    def beyond(drafted: int) -> float | None:
        """Return what a round takes beyond its verifying pass, 0 at least; None where one is missing."""
        whole, part = ms[name, drafted], ms[drafted + 1]
        return None if whole is None or part is None else max(0.0, whole - part)

    one, long = beyond(1), beyond(length)
    if one is None:
        return None
    first, all_steps = one, one * length if long is None else long
    further = max(0.0, all_steps - first) / max(1, length - 1)
    if further > first:  # the first step also reads the pending token: a sample was disturbed
        first = further = all_steps / length
    return (first, further) if all_steps else None


def _with_host(
    passes: dict[int, dict[int, float]], host: Mapping[int, Sequence[float]], longest: int
) -> dict[int, dict[int, float]]:
    """Return batch -> columns in all -> ms of the pass and of the host, whose work grows with the columns."""
    tables: dict[int, dict[int, float]] = {}
    for batch, by_width in passes.items():
        plain, drafting = host[batch]
        slope = max(0.0, drafting - plain) / longest
        tables[batch] = {batch * width: ms + plain + slope * (width - 1) for width, ms in by_width.items()}
    return tables
