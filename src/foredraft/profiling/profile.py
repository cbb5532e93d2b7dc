"""The cost profile: the tables by which policy `auto` decides, measured once for a machine and a model.

Contract: measured while no sequence has a row, and kept on disk under a key that names the machine, the
model, the dtype and the threads, so that a second process starts without measuring. Every cost is the least
of its samples: on a shared machine samples are too long, never too short. A cost whose two least samples
disagree is taken again, and not believed if they never agree; a profile with such a cost is not kept, and one
line in the log says why. Measuring ends after BUDGET_SECONDS: a slow or busy machine goes on with what was
measured so far, and assumes the rest; of samples that scatter it takes the least. What decoding then takes
corrects the costs (`policy.clock`). Measuring only saves time: where it fails, policy `auto` decides by
assumed costs and every request decodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft import user_cache
from foredraft.decode.drafter import Drafter, DraftPass
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Auto, CostTable, Policy
from foredraft.kernels.machine import describe_cpu
from foredraft.profiling.forwards import ForwardMeter, reading
from foredraft.profiling.host import host_ms
from foredraft.profiling.timing import Turns, timed

__all__ = ["Profile", "load_profile", "measure_profile", "steady_seconds", "use_profile"]

logger = logging.getLogger(__name__)

FORMAT = 6  # of kept profiles; raised when what is measured changes, or the speed of the kernels
WIDTHS = (1, 2, 3, 5, 9)  # columns of a row whose passes are timed, besides the longest draft's
DRAFT = 4  # tokens of the drafts that are timed, besides drafts of one: long ones take long
CONTEXT = 256  # tokens of each timed sequence
ASSUMED_PASS = 2.0  # plain steps: most that the pass over the longest draft costs where samples scatter
READ = 64  # tokens that a draft model is timed reading
AGREEMENT = 1.1  # ratio of the two least samples up to which they agree
TURNS = 6, 12  # samples of each cost, at least and at most
LIMIT_SECONDS = 1.0  # for the samples of one batch, or of reading; the last two are for slow models
LIMIT_FIRST = 0.2  # for the runs of one work that say how long a sample takes
LIMIT_STEPS = 60  # plain steps whose time is the limit if it is longer: about three samples of each cost
BUDGET_SECONDS = 3.0  # for all measuring: a load must not wait longer; only the work that runs then ends
LIMIT_READS = 10  # reads whose time is the limit if it is longer: about three samples


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of rounds on this machine.

    Attributes:
        greedy: Of rounds at temperature 0.
        sampled: Of rounds that draw tokens.
        doubt: Why not all costs are believed, for people; None where all were measured and steady.
        seconds: Time that measuring took; 0 where the profile was kept.
    """

    greedy: CostTable
    sampled: CostTable
    doubt: str | None = None
    seconds: float = 0.0

    @property
    def believed(self) -> bool:
        """Whether all costs were measured and steady."""
        return self.doubt is None


def use_profile(
    engine: Engine,
    progress: Callable[[int, int], None] = lambda done, total: None,
    policy: Policy | None = None,
) -> float:
    """Give a policy the costs of this machine, if it decides by costs and has none yet.

    Args:
        engine: No sequence has a row.
        progress: Called as (done, total) while measuring.
        policy: Of a request; None is the engine's.

    Returns:
        Seconds that measuring took; 0 where a kept profile serves.
    """
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
    """Return the profile that is kept for this engine and machine; else measure it and keep it.

    Args:
        engine: No sequence has a row.
        longest: Longest draft.
        progress: Called as (done, total) while measuring.
    """
    key = _key(engine, longest)
    kept = user_cache.read("profiles", key)
    try:
        if kept is not None:
            return Profile(CostTable.from_dict(kept["greedy"]), CostTable.from_dict(kept["sampled"]))
    except (LookupError, TypeError, ValueError, AttributeError):
        pass  # not a profile: measured again
    profile = measure_profile(engine, longest, progress)
    if profile.believed:
        tables = {"greedy": profile.greedy.as_dict(), "sampled": profile.sampled.as_dict()}
        user_cache.write("profiles", key, tables)
    else:
        logger.warning(
            "the costs of this machine are not kept, because %s; policy auto goes on with those that were"
            " measured and assumes the rest",
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
            name: None if (draft := drafter.draft_pass) is None else [_runner(draft.runner), repr(draft.plan)]
            for name, drafter in engine.drafters.items()
        },
        "rows": engine.cache.rows,
        "longest": longest,
    }


def _runner(runner: Any) -> list[str]:
    return [repr(runner.decoder.spec), runner.choices]


def measure_profile(
    engine: Engine, longest: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Profile:
    """Measure what rounds of one row, and of as many rows as the cache has, cost.

    Arguments as `load_profile`.
    """
    started = time.perf_counter()
    deadline = started + BUDGET_SECONDS
    longest = min(longest, engine.target.max_queries - 1)
    batches = sorted({1, engine.cache.rows})
    passes: dict[int, dict[int, float]] = {}
    drafts: dict[str, dict[int, tuple[float, float]]] = {}
    host: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    steady: list[bool] = []  # of each cost that is wanted
    sound = True
    for done, batch in enumerate(batches):
        progress(done, len(batches))
        if passes and time.perf_counter() >= deadline:
            steady += [False] * len(steady)  # the costs of one row serve
            break
        context = max(2, min(CONTEXT, engine.cache.positions - longest - 1))
        draft = min(DRAFT, longest)
        widths = sorted({*(w for w in WIDTHS if w <= longest + 1), 2, draft + 1, longest + 1})
        meter = ForwardMeter(
            engine.target, engine.drafters, batch, context, widths=widths, lengths={1, draft}, settle=0.0
        )
        _take_turns(meter.turns, 1, LIMIT_STEPS, deadline)
        ms = {key: 1e3 * min(samples) if samples else None for key, samples in meter.seconds.items()}
        steady += [steady_seconds(samples) is not None for samples in meter.seconds.values()]
        plain = 1e3 * min(meter.seconds[1])
        passes[batch] = {1: plain} | {n: known for n in widths if (known := ms[n]) is not None}
        for name, drafter in engine.drafters.items():
            cost = _draft_cost(ms, name, drafter, draft)
            if cost is not None:
                drafts.setdefault(name, {})[batch] = cost
        for draws in (False, True):
            host[draws][batch] = []
            for length in (0, longest):
                took: float | None = 0.0  # as if it were free, where it is not known
                if in_time := time.perf_counter() < deadline:
                    took = host_ms(engine, batch, length, draws=draws, until=deadline)
                    sound &= took is not None
                steady.append(in_time)
                host[draws][batch].append(took or 0.0)
    readers = _readers(engine)
    reads = _reads(readers, engine.device, deadline)  # reading draws no tokens, so both tables share it
    steady += [name in reads for name in readers]
    progress(len(batches), len(batches))
    seconds = time.perf_counter() - started
    doubt = _doubt(seconds, steady, sound)
    if doubt is not None:
        passes = {batch: _assumed(by_width, longest) for batch, by_width in passes.items()}
    greedy, sampled = (
        CostTable(_with_host(passes, host[draws], longest), drafts, reads) for draws in (False, True)
    )
    return Profile(greedy, sampled, doubt, seconds)


def _doubt(seconds: float, steady: Sequence[bool], sound: bool) -> str | None:
    """Return why costs are not believed; None where they are.

    Args:
        seconds: Time that measuring took.
        steady: Of each cost that is wanted, whether it was measured and two samples agree.
        sound: Host work could be measured.
    """
    if all(steady):
        return None if sound else "the model's logits are not finite on the texts that are timed"
    few = f"{steady.count(True)} of {len(steady)} costs were steady"
    if seconds >= BUDGET_SECONDS:
        return f"measuring was cut short after {BUDGET_SECONDS:g} s, when {few}"
    return f"only {few}, as where other programs run beside"


def steady_seconds(samples: Sequence[float]) -> float | None:
    """Return the least sample, or None unless the second least agrees with it."""
    least = sorted(samples)[:2]
    return least[0] if len(least) == 2 and least[1] <= AGREEMENT * least[0] else None


def _take_turns(turns: Turns, unit: object, count: int, deadline: float) -> None:
    """Take turns until every work is steady, for LIMIT_SECONDS, or as long as `count` runs of `unit`.

    No work begins after the deadline, but for one run of `unit`.
    """
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
        if turn >= TURNS[0] and None not in map(steady_seconds, turns.seconds.values()):
            return
        if time.perf_counter() >= until:
            return


def _draft_cost(
    ms: dict[Any, float | None], name: str, drafter: Drafter, length: int
) -> tuple[float, float] | None:
    """Return (first step, further step) in ms; None where a cost is missing, or steps would be free.

    Rounds that draft 1 token and `length` tokens were timed.
    """
    if drafter.draft_pass is None:
        return 0.0, 0.0
    one, long = (_beyond(ms, (name, drafted), drafted + 1) for drafted in (1, length))
    if one is None:
        return None
    first, all_steps = one, one * length if long is None else long
    further = max(0.0, all_steps - first) / max(1, length - 1)
    if further > first:  # the first step also reads the pending token: a sample was disturbed
        first = further = all_steps / length
    return (first, further) if all_steps else None


def _beyond(ms: dict[Any, float | None], round: object, verifying: object) -> float | None:
    """Return what a round takes beyond its verifying pass, 0 at least; None where one is missing."""
    whole, part = ms[round], ms[verifying]
    return None if whole is None or part is None else max(0.0, whole - part)


def _assumed(by_width: dict[int, float], longest: int) -> dict[int, float]:
    """Return the passes of a disturbed machine, of which none is dearer than ASSUMED_PASS lets it be.

    Samples may agree and still be disturbed. Without this a policy might never draft, and so never learn.
    """
    slope = (ASSUMED_PASS - 1) * by_width[1] / longest
    widths = sorted({*by_width, longest + 1})
    return {n: min(by_width.get(n, math.inf), by_width[1] + slope * (n - 1)) for n in widths}


def _with_host(
    passes: dict[int, dict[int, float]], host: dict[int, list[float]], longest: int
) -> dict[int, dict[int, float]]:
    """Return batch -> columns in all -> ms of the pass and of the host, whose work grows with the columns."""
    tables: dict[int, dict[int, float]] = {}
    for batch, by_width in passes.items():
        plain, drafting = host[batch]
        slope = max(0.0, drafting - plain) / longest
        tables[batch] = {batch * width: ms + plain + slope * (width - 1) for width, ms in by_width.items()}
    return tables


def _readers(engine: Engine) -> dict[str, DraftPass]:
    """Return the passes of the draft models, which read texts in a cache of their own."""
    passes = {name: drafter.draft_pass for name, drafter in engine.drafters.items()}
    return {name: own for name, own in passes.items() if own is not None and own.runner is not engine.target}


def _reads(readers: dict[str, DraftPass], device: torch.device, deadline: float) -> dict[str, float]:
    """Return drafter -> ms that a draft model takes for one token more of a text that it reads."""
    works = {(name, tokens): reading(own, tokens) for name, own in readers.items() for tokens in (1, READ)}
    if not works or time.perf_counter() >= deadline:
        return {}
    turns = Turns(works, device, 0.0)
    _take_turns(turns, max(works, key=lambda work: work[1]), LIMIT_READS, deadline)
    reads: dict[str, float] = {}
    for name in readers:
        one, many = (steady_seconds(turns.seconds[name, tokens]) for tokens in (1, READ))
        if one is not None and many is not None:
            reads[name] = 1e3 * max(0.0, many - one) / (READ - 1)
    return reads
