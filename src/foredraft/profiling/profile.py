"""The cost profile: the tables by which policy `auto` decides, measured for a machine and a model.

It is measured while no sequence has a row, and kept under a key that names the machine, the model, the dtype
and the threads. Costs that are not steady are taken again by the next process. Measuring ends after
BUDGET_SECONDS: the rest is assumed, and what decoding takes corrects it. Where measuring fails, every request
still decodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft import user_cache
from foredraft.decode.drafter import Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Policy
from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.cost_table import CostTable
from foredraft.kernels.compilation import describe_cpu
from foredraft.profiling.measured_samples import Forwards, HostWork, Reading, Samples

logger = logging.getLogger(__name__)

FORMAT = 8  # of kept profiles; raised when what is measured changes, or the speed of the kernels
ASSUMED_PASS = 2.0  # plain steps: most that one row's pass over its longest draft costs where samples scatter
BUDGET_SECONDS = 3.0  # for all measuring: a load must not wait longer; only the work that runs then ends
BUDGET_AGAIN = 1.0  # the same at later starts, which have costs to begin with


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of rounds on this machine."""

    greedy: CostTable  # of rounds at temperature 0
    sampled: CostTable  # of rounds that draw tokens
    doubt: str | None = None  # why not all costs are believed; None where all were measured and steady
    seconds: float = 0.0  # time that measuring took; 0 where all costs were kept

    @property
    def believed(self) -> bool:
        """Whether all costs were measured and steady."""
        return self.doubt is None


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
    profile = measure_profile(engine, longest, progress, samples)
    if profile.seconds:
        user_cache.write("profiles", key, samples.least)
    if profile.doubt is not None:
        logger.warning(
            "not all costs of this machine are known, because %s; policy auto goes on with those that were"
            " measured, assumes the rest, and measures them at the next start",
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
    budget = BUDGET_AGAIN if samples.least else BUDGET_SECONDS
    deadline = started + budget
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
    steady = [known for each in forwards for known in each.steady(samples)]
    steady += [*host.steady(samples), *reading.steady(samples)]
    doubt = _doubt(seconds, budget, steady, host.sound)
    timed = [each for each in forwards if each.batch in host.batches]
    passes = _passes(timed, samples)
    if doubt is not None:
        column = (ASSUMED_PASS - 1) * passes[1][1] / longest
        passes = {batch: _assumed(by_width, longest, batch * column) for batch, by_width in passes.items()}
    drafts, reads = _drafts(engine, timed, samples), reading.ms(samples)  # these draw no tokens

    def table(draws: bool) -> CostTable:
        known = _with_host(passes, host.ms(samples, draws=draws), longest)
        return CostTable(known, drafts, reads, trees=host.tree_ms(samples, passes, draws=draws))

    return Profile(table(draws=False), table(draws=True), doubt, seconds)


def _passes(forwards: Sequence[Forwards], samples: Samples) -> dict[int, dict[int, float]]:
    """Return batch -> columns of a row -> ms of the pass."""
    found = {}
    for each in forwards:
        ms = each.ms(samples)
        found[each.batch] = {width: known for width in each.widths if (known := ms[width]) is not None}
    return found


def _drafts(
    engine: Engine, forwards: Sequence[Forwards], samples: Samples
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return drafter -> batch -> ms of the first and of a further step."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for each in forwards:
        ms = each.ms(samples)
        for name, drafter in engine.drafters.items():
            if (steps := _draft_cost(ms, name, drafter, each.draft)) is not None:
                found.setdefault(name, {})[each.batch] = steps
    return found


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


def _assumed(by_width: dict[int, float], longest: int, slope: float) -> dict[int, float]:
    """Return the passes of a disturbed machine, none dearer than where a token more a row takes `slope` ms.

    Samples may agree and still be disturbed; without this a policy might never draft, and so never learn.
    """
    widths = sorted({*by_width, longest + 1})
    return {n: min(by_width.get(n, math.inf), by_width[1] + slope * (n - 1)) for n in widths}


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
