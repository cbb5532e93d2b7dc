"""The cost of a plan's draft steps, in plain steps: a fixed part, each sub-layer's own, and the part of all
together beyond their sum.

Contract: bare rounds by a few plans take turns: one that runs nothing, one of each kind of sub-layer alone,
one that runs all. A draft's time is what a round takes beyond its verifying pass, as in `profiling.forwards`;
a figure is the median of the ratios to a plain step within the turns, so that a machine that slows down
burdens both sides. The more weights a draft reads, the fewer of them are still in a cache at its next step,
so that sub-layers together take more than each kind alone: by the square of what runs. All other host work of
a round is missing, as in every prediction (docs/architecture.md, "Words").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.decode.noise import DRAFT, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.drafters.skips import Skips
from foredraft.llm import LLM
from foredraft.model.decoder import Plan
from foredraft.model.runner import Runner
from foredraft.profiling.forwards import BareForwards, Draws, draft_seconds, in_sequence
from foredraft.profiling.timing import Work, interleaved
from foredraft.tune.exit_costs import ExitCosts, measure_exit_costs
from foredraft.tune.expected_rounds import Floats
from foredraft.tune.progress import Progress, Steps, silent

__all__ = ["PlanCosts", "measure_plan_costs"]

REPEATS = 30


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """step_seconds: of a plain step, the unit of all others. fixed: of a draft step that leaves all layers
    out: embedding, norm, head, draw. attention: by layer. mlp: of any layer. verifying: v(2), v(3), ...
    exit: of early exits, None where there is none. together: what a step of all sub-layers takes beyond
    their sum. start: what a draft takes beside its steps, since its first one finds the weights as the
    target left them."""

    step_seconds: float
    fixed: float
    attention: tuple[float, ...]
    mlp: float
    verifying: tuple[float, ...]
    exit: ExitCosts | None = None
    together: float = 0.0
    start: float = 0.0

    def step(self, plan: Plan) -> float:
        """c of a draft that leaves sub-layers out."""
        attention = sum(cost for cost, runs in zip(self.attention, plan.attention, strict=True) if runs)
        own, whole = attention + self.mlp * sum(plan.mlp), sum(self.attention) + self.mlp * len(plan.mlp)
        return self.fixed + own + self.together * (own / whole if whole else 0.0) ** 2

    def speedups(self, skips: Skips, taus: Floats) -> Floats:
        """S = tau / (start + k c + v(k + 1)) at draft lengths k from 1 on -> [K]."""
        verifying = list(self.verifying)
        lengths = np.arange(1, len(taus) + 1)
        drafts = self.start + lengths * self.step(skips.plan(len(self.attention)))
        if skips.exit is not None:
            assert self.exit is not None
            one_by_one, verifying = self.exit.at(skips.exit)
            drafts = np.maximum(drafts, lengths * one_by_one)  # the same layers, and never in one call
        found: Floats = taus / (drafts + np.array(verifying[: len(taus)]))
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
    spec, of_exits = llm._spec, max(1, repeats // 2)
    after = Steps(progress, "costs", 1 + repeats + (1 + of_exits if spec.layers > 1 else 0))
    everything = range(spec.layers)
    full = Plan.full(spec.layers)
    nothing = full.without(everything, everything)
    layers_of = {
        window: [i for i, own in enumerate(spec.windows) if own == window] for window in spec.windows
    }
    others = (set(everything).difference(layers) for layers in layers_of.values())
    alone = [*(full.without(rest, everything) for rest in others), full.without(attention=everything)]
    steps, seconds = _timed(llm, [nothing, *alone, full], context, longest, temperature, repeats, after)
    drafts = {
        key: draft_seconds(steps[key], steps["verify", key[1] + 1]) for key in steps if key[0] != "verify"
    }
    start, fixed = _line(drafts[nothing, 1], drafts[nothing, longest], longest)
    own = [max(0.0, (drafts[plan, longest] - start) / longest - fixed) for plan in (*alone, full)]
    (*attention, mlp), together = _parts(own[:-1], own[-1])
    each = [part / len(layers) for part, layers in zip(attention, layers_of.values(), strict=True)]
    by_window = dict(zip(layers_of, each, strict=True))
    # fewer columns never take more: what was measured otherwise was disturbed
    table = CostTable({1: {rows: median(steps["verify", rows]) for rows in range(2, longest + 2)}}, {})
    return PlanCosts(
        seconds, fixed, tuple(by_window[window] for window in spec.windows), mlp / spec.layers,
        tuple(max(1.0, table.verify(1, rows)) for rows in range(2, longest + 2)),
        measure_exit_costs(llm, context, longest, of_exits, after), together, start,
    )  # fmt: skip


def _line(one: float, all: float, longest: int) -> tuple[float, float]:
    """What a draft takes beside its steps, half of the longest at most, and what in each, by drafts of one
    step and of `longest`."""
    start = min(max(0.0, (longest * one - all) / (longest - 1)), all / 2) if longest > 1 else 0.0
    return start, (all - start) / longest


def _parts(alone: Sequence[float], whole: float) -> tuple[list[float], float]:
    """What each kind takes by itself, and all together beyond their sum: by the square of the share of them
    that runs, of which each kind alone has a part, too. They sum up to the whole, whatever a clock said."""
    total = sum(alone)
    shares = [part / total if total else 1 / len(alone) for part in alone]
    beyond = (whole - total) / (1 - sum(share**2 for share in shares)) if max(shares) < 1 else 0.0
    together = min(max(0.0, beyond), whole / 2)
    return [share * (whole - together) for share in shares], together


def _timed(
    llm: LLM,
    plans: Sequence[Plan],
    context: int,
    longest: int,
    temperature: float,
    repeats: int,
    after: Callable[[], None],
) -> tuple[dict[Any, list[float]], float]:
    """In plain steps, by turns: of verifying passes, by ("verify", rows), and of whole rounds, by (plan, the
    draft's length): of all plans with the longest draft, of the first one with a single token, too. And a
    plain step's seconds. A draft is made in one call where the engine would."""
    runner = llm._engine.target
    assert isinstance(runner, Runner)
    bare = BareForwards(runner, 1, context, longest + 1)
    works: dict[Any, Work] = {"step": bare.verify(1)}
    for rows in range(2, longest + 2):
        works["verify", rows] = bare.verify(rows)
    for plan, length in dict.fromkeys([(plans[0], 1), *((plan, longest) for plan in plans)]):
        draws = _draws(llm, context, length, temperature)
        draft = bare.draft(DraftPass(runner, plan), length, draws)
        works[plan, length] = in_sequence(draft, works["verify", length + 1])
    seconds = interleaved(works, llm._engine.device, repeats, warm=1, settle=0.0, after=after)
    plain = seconds.pop("step")
    found = {
        key: [own / step for own, step in zip(turns, plain, strict=True)] for key, turns in seconds.items()
    }
    return found, median(plain)


def _draws(llm: LLM, context: int, longest: int, temperature: float) -> Callable[[], Draws]:
    """At this temperature, as the engine has them."""
    device, vocab_ops = llm._engine.device, llm._engine.vocab_ops
    table = SamplingTable.of([SamplingParams(temperature=temperature)], device, vocab_ops=vocab_ops)
    noise, zero = Noise(), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.arange(context, context + longest, device=device)[None]  # [1, K]

    def draws() -> Draws:
        keys = NoiseKeys(zero, places, None, zero, vocab_ops)

        def draw(column: int, logits: Tensor) -> Tensor:
            pick = partial(noise.pick, keys=keys.column(column), purpose=DRAFT)
            return distribution_of(logits, table)[0].draw(pick)

        return Draws(None if table.all_greedy else table.sampling_inputs(keys.bits(DRAFT)), draw)

    return draws
