"""Plan costs: the cost of a plan's draft steps, in plain steps.

A draft step has a fixed cost, the own cost of each sub-layer that it runs, and a joint cost. The joint cost
exists because a draft that reads more weights finds fewer of them in the CPU's cache at its next step; it
grows with the square of the share that runs.

Contract: no plan of the search is timed. Bare rounds of a few plans take turns: nothing runs, one kind of
sub-layer alone, everything. A draft takes the time of a round less that of its verifying pass
(`profiling.forwards`). A cost is the median of the ratios to a plain step of the same turn, so a machine that
slows down changes both sides. All other host work of a round is left out, as in every prediction
(docs/architecture.md, "Words").
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
from foredraft.llm.loaded import Loaded
from foredraft.model.plan import Plan
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
    """Costs of draft steps and verifying passes, in plain steps.

    Attributes:
        step_seconds: Seconds of a plain step, the unit of all other costs.
        fixed: A draft step that skips all layers: embedding, norm, head, draw.
        attention: Attention of each layer.
        mlp: The MLP of any layer.
        verifying: v(2), v(3), ...
        exit: Costs of early exits; None where the model has no layer to exit before.
        together: The joint cost of a step that runs all sub-layers.
        start: The cost of a draft beside its steps: its first step finds in the CPU's cache what the target
            left there.
    """

    step_seconds: float
    fixed: float
    attention: tuple[float, ...]
    mlp: float
    verifying: tuple[float, ...]
    exit: ExitCosts | None = None
    together: float = 0.0
    start: float = 0.0

    def step(self, plan: Plan) -> float:
        """Return c, the cost of a draft step of this plan."""
        attention = sum(cost for cost, runs in zip(self.attention, plan.attention, strict=True) if runs)
        own, whole = attention + self.mlp * sum(plan.mlp), sum(self.attention) + self.mlp * len(plan.mlp)
        return self.fixed + own + self.together * (own / whole if whole else 0.0) ** 2

    def speedups(self, skips: Skips, taus: Floats) -> Floats:
        """Return S = tau / (start + k c + v(k + 1)) at draft lengths k = 1, 2, ...: [K]."""
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
    def from_json(cls, text: str) -> PlanCosts:
        """Return the costs whose fields this JSON object holds."""
        found: dict[str, Any] = json.loads(text)
        for name in ("attention", "verifying"):
            found[name] = tuple(found[name])
        if (exit := found["exit"]) is not None:
            lines = [(start, slope) for start, slope in exit["verifying"]]
            found["exit"] = ExitCosts((exit["step"][0], exit["step"][1]), tuple(lines))
        return cls(**found)


def measure_plan_costs(
    loaded: Loaded,
    context: int,
    longest: int,
    temperature: float,
    progress: Progress = silent,
    repeats: int = REPEATS,
    drafting: Runner | None = None,
) -> PlanCosts:
    """Measure the costs at batch 1.

    Args:
        loaded: The model.
        context: Tokens before the drafts.
        longest: Tokens of the longest draft.
        temperature: Temperature of the draws.
        progress: Called after each turn.
        repeats: Turns that count.
        drafting: Runs the drafts: a copy of the model, whose early exits save no verification, since its
            states are not the model's. None is the model itself.
    """
    spec, of_exits = loaded.spec, max(1, repeats // 2)
    exits = spec.layers > 1 and drafting is None
    after = Steps(progress, "costs", 1 + repeats + (1 + of_exits if exits else 0))
    everything = range(spec.layers)
    full = Plan.full(spec.layers)
    nothing = full.without(everything, everything)
    layers_of = {
        window: [i for i, own in enumerate(spec.windows) if own == window] for window in spec.windows
    }
    others = (set(everything).difference(layers) for layers in layers_of.values())
    alone = [*(full.without(rest, everything) for rest in others), full.without(attention=everything)]
    steps, seconds = _timed(
        loaded, [nothing, *alone, full], context, longest, temperature, repeats, after, drafting
    )
    drafts = {
        key: draft_seconds(steps[key], steps["verify", key[1] + 1]) for key in steps if key[0] != "verify"
    }
    start, fixed = _line(drafts[nothing, 1], drafts[nothing, longest], longest)
    own = [max(0.0, (drafts[plan, longest] - start) / longest - fixed) for plan in (*alone, full)]
    (*attention, mlp), together = _parts(own[:-1], own[-1])
    each = [part / len(layers) for part, layers in zip(attention, layers_of.values(), strict=True)]
    by_window = dict(zip(layers_of, each, strict=True))
    # fewer columns never cost more: a sample that says otherwise was disturbed, and the table corrects it
    table = CostTable({1: {rows: median(steps["verify", rows]) for rows in range(2, longest + 2)}}, {})
    return PlanCosts(
        seconds, fixed, tuple(by_window[window] for window in spec.windows), mlp / spec.layers,
        tuple(max(1.0, table.verify(1, rows)) for rows in range(2, longest + 2)),
        measure_exit_costs(loaded, context, longest, of_exits, after) if exits else None, together, start,
    )  # fmt: skip


def _line(one: float, all: float, longest: int) -> tuple[float, float]:
    """Return (cost beside the steps, cost of a step) of a draft, from drafts of one and of `longest` steps.

    The cost beside the steps is half of the longest draft's at most.
    """
    start = min(max(0.0, (longest * one - all) / (longest - 1)), all / 2) if longest > 1 else 0.0
    return start, (all - start) / longest


def _parts(alone: Sequence[float], whole: float) -> tuple[list[float], float]:
    """Return (own cost of each kind of sub-layer, joint cost of all); they sum to `whole`.

    Args:
        alone: Cost of a step that runs one kind alone. The square of its share of the joint cost is in it.
        whole: Cost of a step that runs everything.
    """
    total = sum(alone)
    shares = [part / total if total else 1 / len(alone) for part in alone]
    beyond = (whole - total) / (1 - sum(share**2 for share in shares)) if max(shares) < 1 else 0.0
    together = min(max(0.0, beyond), whole / 2)
    return [share * (whole - together) for share in shares], together


def _timed(
    loaded: Loaded,
    plans: Sequence[Plan],
    context: int,
    longest: int,
    temperature: float,
    repeats: int,
    after: Callable[[], None],
    drafting: Runner | None,
) -> tuple[dict[Any, list[float]], float]:
    """Time verifying passes and whole rounds in turns with plain steps.

    A draft is fused where the engine would fuse it.

    Returns:
        Cost of each turn in plain steps, by ("verify", rows) and by (plan, draft length): the longest draft
        of all plans, and a draft of one token of the first plan. And the seconds of a plain step.
    """
    runner = loaded.runner
    bare = BareForwards(runner, 1, context, longest + 1)
    works: dict[Any, Work] = {"step": bare.verify(1)}
    for rows in range(2, longest + 2):
        works["verify", rows] = bare.verify(rows)
    for plan, length in dict.fromkeys([(plans[0], 1), *((plan, longest) for plan in plans)]):
        draws = _draws(loaded, context, length, temperature)
        draft = bare.draft(DraftPass(drafting or runner, plan), length, draws)
        works[plan, length] = in_sequence(draft, works["verify", length + 1])
    seconds = interleaved(works, loaded.engine.device, repeats, warm=1, settle=0.0, after=after)
    plain = seconds.pop("step")
    found = {
        key: [own / step for own, step in zip(turns, plain, strict=True)] for key, turns in seconds.items()
    }
    return found, median(plain)


def _draws(loaded: Loaded, context: int, longest: int, temperature: float) -> Callable[[], Draws]:
    """Return a function that makes the draws of a draft at this temperature, as the engine draws."""
    device, vocab_ops = loaded.engine.device, loaded.engine.vocab_ops
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
