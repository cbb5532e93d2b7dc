"""What a plan's draft steps cost, in plain steps: a part that every draft has, and each sub-layer's own.

Contract: a plan is never timed by itself. Bare rounds by a few plans, each without one kind of sub-layer,
take turns; a draft's time is what a round takes beyond its verifying pass, as in `bench.bare`, and the parts
are what explains the drafts' best (least squares). The part that every draft has is embedding, norm, head and
draw. All other host work of a round is missing, as in every prediction (docs/architecture.md, "Words").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.bench.bare import SETTLE, BareRounds, Draws, Work, draft_seconds, one_after_the_other
from foredraft.bench.costs import measure_costs
from foredraft.bench.timing import interleaved
from foredraft.decode.draft_pass import DraftPass
from foredraft.decode.noise import DRAFT, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.sampling import SamplingTable, law_of
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM
from foredraft.model.decoder import Plan
from foredraft.model.runner import Runner
from foredraft.tune.exits import ExitCosts, measure_exit_costs
from foredraft.tune.progress import Progress, Steps, silent
from foredraft.tune.rounds import Floats

__all__ = ["PlanCosts", "measure_plan_costs"]

REPEATS = 30


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """step_seconds: of a plain step, the unit of all others. fixed: of a draft step that leaves all layers
    out. attention: by layer. mlp: of any layer. verifying: v(2), v(3), ... exit: of early exits, None where
    there is none."""

    step_seconds: float
    fixed: float
    attention: tuple[float, ...]
    mlp: float
    verifying: tuple[float, ...]
    exit: ExitCosts | None = None

    def step(self, plan: Plan) -> float:
        """c of a draft that leaves sub-layers out."""
        attention = sum(cost for cost, runs in zip(self.attention, plan.attention, strict=True) if runs)
        return self.fixed + attention + self.mlp * sum(plan.mlp)

    def speedups(self, skips: Skips, taus: Floats) -> Floats:
        """S = tau / (k c + v(k + 1)) at draft lengths k from 1 on -> [K]."""
        c, verifying = self.step(skips.plan(len(self.attention))), list(self.verifying)
        if skips.exit is not None:
            assert self.exit is not None
            one_by_one, verifying = self.exit.at(skips.exit)
            c = max(c, one_by_one)  # the same layers, and never in one call
        lengths = np.arange(1, len(taus) + 1)
        found: Floats = taus / (lengths * c + np.array(verifying[: len(taus)]))
        return found

    @classmethod
    def told(cls, words: str) -> PlanCosts:
        """From the JSON of its fields."""
        found: dict[str, Any] = json.loads(words)
        for name in ("attention", "verifying"):
            found[name] = tuple(found[name])
        if (exit := found["exit"]) is not None:
            lines = [(start, slope) for start, slope in exit["verifying"]]
            found["exit"] = ExitCosts((exit["step"][0], exit["step"][1]), tuple(lines))
        return cls(**found)


def measure_plan_costs(
    llm: LLM,
    context: int,
    longest: int,
    temperature: float,
    progress: Progress = silent,
    repeats: int = REPEATS,
) -> PlanCosts:
    """At batch 1, with `context` tokens before the drafts, which are `longest` tokens long."""
    spec, of_exits = llm.spec, max(1, repeats // 2)
    turns = 2 * (1 + repeats) + (1 + of_exits if spec.layers > 1 else 0)  # each warms up for one
    after = Steps(progress, "costs", turns)
    bare = measure_costs(llm, 1, context, longest, repeats=repeats, after=after)
    verifying = {cost.rows: cost.v for cost in bare.verifying}
    full = Plan.full(spec.layers)
    windows = tuple(dict.fromkeys(spec.windows))
    layers_of = {window: [i for i, own in enumerate(spec.windows) if own == window] for window in windows}
    everything = range(spec.layers)
    plans = [
        full,
        *(full.without(attention=layers) for layers in layers_of.values()),
        full.without(mlp=everything),
        full.without(everything, everything),
    ]
    step, *drafts = _timed(llm, plans, context, longest, temperature, repeats, after)
    counts = [
        [1, *(sum(plan.attention[i] for i in layers) for layers in layers_of.values()), sum(plan.mlp)]
        for plan in plans
    ]
    parts, *_ = np.linalg.lstsq(np.array(counts, float), np.array(drafts) / step, rcond=None)
    fixed, *attention, mlp = (max(0.0, float(part)) for part in parts)
    by_window = dict(zip(windows, attention, strict=True))
    return PlanCosts(
        step, fixed, tuple(by_window[window] for window in spec.windows), mlp,
        tuple(verifying[rows] for rows in range(2, longest + 2)),
        measure_exit_costs(llm, context, longest, of_exits, after),
    )  # fmt: skip


def _timed(
    llm: LLM,
    plans: list[Plan],
    context: int,
    longest: int,
    temperature: float,
    repeats: int,
    after: Callable[[], None],
) -> list[float]:
    """Seconds of a plain step, and of one draft step of each plan: its share of the longest draft, which is
    made in one call where the engine would."""
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    bare = BareRounds(runner, 1, context, longest + 1)
    verify = bare.forward(longest + 1)
    draws = _draws(llm, context, longest, temperature)
    works: dict[object, Work] = {"verify": verify}
    for number, plan in enumerate(plans):
        works[number] = one_after_the_other(bare.draft(DraftPass(runner, plan), longest, draws), verify)
    works["step"] = bare.forward(1)
    seconds = interleaved(works, llm.engine.device, repeats, warm=1, settle=SETTLE, after=after)
    drafts = [draft_seconds(seconds[number], seconds["verify"]) / longest for number in range(len(plans))]
    return [median(seconds["step"]), *drafts]


def _draws(llm: LLM, context: int, longest: int, temperature: float) -> Callable[[], Draws]:
    """At this temperature, as the engine has them."""
    device, operators = llm.engine.device, llm.engine.operators
    table = SamplingTable.of([SamplingParams(temperature=temperature)], device, operators=operators)
    noise, zero = Noise(), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.arange(context, context + longest, device=device)[None]  # [1, K]

    def draws() -> Draws:
        keys = NoiseKeys(zero, places, None, zero, operators)

        def draw(column: int, logits: Tensor) -> Tensor:
            pick = partial(noise.pick, keys=keys.column(column), purpose=DRAFT)
            return law_of(logits, table)[0].draw(pick)

        return Draws(None if table.all_greedy else table.drawing(keys.bits(DRAFT)), draw)

    return draws
