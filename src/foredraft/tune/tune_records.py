"""The costs of a plan's draft steps and of early exits, and the records of a search, for pages and programs.

No plan of the search is timed. Bare rounds of a few plans take turns: nothing runs, one kind of sub-layer
alone, everything. A draft step has a fixed cost, the own cost of each sub-layer that it runs, and a joint
cost, which grows with the square of the share that runs: a draft that reads more weights finds fewer of them
in the CPU's cache. Only the exits after the first layer and before the last are timed; their verifying passes
resume from their states, so an exit has other costs than a plan that skips the same layers.

A figure that could not be measured is None, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import comb
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.bench.bench_records import Spread, load_doubt
from foredraft.bench.settings import Progress, Steps, silent
from foredraft.decode.drafter import DraftPass
from foredraft.decode.noise import DRAFT, Noise, NoiseKeys
from foredraft.decode.params import SamplingParams
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.sampling import SamplingTable, distribution_of
from foredraft.drafters.plan_files import Skips
from foredraft.llm.loaded import Loaded
from foredraft.model.runner import Resume, Runner
from foredraft.model.spec import Plan
from foredraft.profiling.timing import BareForwards, TimedDraws, TimedTurns, Work, draft_seconds, in_sequence
from foredraft.tune.teacher_forced import Floats

Line = tuple[float, float]  # (intercept, slope by layer)
LIKELIEST = TimedDraws(draw=lambda column, logits: logits.argmax(-1))


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Costs by the exit's layer, in plain steps."""

    step: Line  # c
    verifying: tuple[Line, ...]  # v(2), v(3), ... of passes that resume at the exit

    def at(self, exit: int) -> tuple[float, list[float]]:
        """Return c and v(2), v(3), ..., 1 at least: the last drafted token runs through all layers."""
        step, *verifying = (start + slope * exit for start, slope in (self.step, *self.verifying))
        return step, [max(1.0, cost) for cost in verifying]


def measure_exit_costs(
    loaded: Loaded, context: int, longest: int, repeats: int, after: Callable[[], None]
) -> ExitCosts:
    """Measure the costs at batch 1 of a model of two layers or more."""
    runner, exits = loaded.runner, sorted({1, loaded.spec.layers - 1})
    bare = BareForwards(runner, 1, context, longest + 1)
    tokens = bare.tokens(longest + 1)
    states = runner.decoder.embed(tokens, tokens)  # token 0 at position 0
    works: dict[Any, Work] = {}
    for exit in exits:
        for rows in range(2, longest + 2):  # all but the last drafted token were read
            works["verify", exit, rows] = bare.verify(rows, Resume(exit, states[:, :rows], [rows - 1]))
        draft_pass = DraftPass(runner, Skips(exit=exit).plan(loaded.spec.layers), exit=exit)
        draft = bare.draft(draft_pass, longest, lambda: LIKELIEST)
        works["round", exit] = in_sequence(draft, works["verify", exit, longest + 1])
    steps, _ = _timed(bare, works, repeats, after)
    drafts = [draft_seconds(steps["round", exit], steps["verify", exit, longest + 1]) for exit in exits]
    verifying = (
        _exit_line(exits, [median(steps["verify", exit, rows]) for exit in exits])
        for rows in range(2, longest + 2)
    )
    return ExitCosts(_exit_line(exits, [draft / longest for draft in drafts]), tuple(verifying))


def _exit_line(exits: list[int], costs: list[float]) -> Line:
    """Return the line through the costs of one or two exits."""
    (start, slope), *_ = np.linalg.lstsq(np.array([[1, exit] for exit in exits], float), np.array(costs))
    return float(start), float(slope)


REPEATS = 30


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Costs of draft steps and verifying passes, in plain steps."""

    step_seconds: float  # seconds of a plain step, the unit of all other costs
    fixed: float  # a draft step that skips all layers: embedding, norm, head, draw
    attention: tuple[float, ...]  # attention of each layer
    mlp: float  # the MLP of any layer
    verifying: tuple[float, ...]  # v(2), v(3), ..
    exit: ExitCosts | None = None  # costs of early exits; None where the model has no layer to exit before
    together: float = 0.0  # the joint cost of a step that runs all sub-layers
    start: float = 0.0  # of a draft beside its steps: the first finds what the target left in the CPU's cache

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


def measure_plan_costs(
    loaded: Loaded,
    context: int,
    longest: int,
    temperature: float,
    progress: Progress = silent,
    repeats: int = REPEATS,
    drafting: Runner | None = None,
) -> PlanCosts:
    """Measure the costs at batch 1."""
    spec, of_exits = loaded.spec, max(1, repeats // 2)
    exits = spec.layers > 1 and drafting is None
    after = Steps(progress, "costs", 1 + repeats + (1 + of_exits if exits else 0))
    everything = range(spec.layers)
    full = Plan.full(spec.layers)
    nothing = full.without(everything, everything)
    kinds = [(spec.attends(layer), window) for layer, window in enumerate(spec.windows)]
    layers_of = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in kinds}
    others = (set(everything).difference(layers) for layers in layers_of.values())
    alone = [*(full.without(rest, everything) for rest in others), full.without(attention=everything)]
    bare = BareForwards(loaded.runner, 1, context, longest + 1)
    works: dict[Any, Work] = {("verify", rows): bare.verify(rows) for rows in range(2, longest + 2)}
    plans = (nothing, *alone, full)
    for plan, length in dict.fromkeys([(nothing, 1), *((plan, longest) for plan in plans)]):
        draws = _draws(loaded, context, length, temperature)
        draft = bare.draft(DraftPass(drafting or loaded.runner, plan), length, draws)
        works[plan, length] = in_sequence(draft, works["verify", length + 1])
    steps, seconds = _timed(bare, works, repeats, after)
    drafts = {
        key: draft_seconds(steps[key], steps["verify", key[1] + 1]) for key in steps if key[0] != "verify"
    }
    start, fixed = _line(drafts[nothing, 1], drafts[nothing, longest], longest)
    *own, whole = (max(0.0, (drafts[plan, longest] - start) / longest - fixed) for plan in (*alone, full))
    (*attention, mlp), together = _parts(own, whole)
    each = [part / len(layers) for part, layers in zip(attention, layers_of.values(), strict=True)]
    by_kind = dict(zip(layers_of, each, strict=True))
    # fewer columns never cost more: a sample that says otherwise was disturbed, and the table corrects it
    table = CostTable({1: {rows: median(steps["verify", rows]) for rows in range(2, longest + 2)}}, {})
    return PlanCosts(
        seconds, fixed, tuple(by_kind[kind] for kind in kinds), mlp / spec.layers,
        tuple(max(1.0, table.verify(1, rows)) for rows in range(2, longest + 2)),
        measure_exit_costs(loaded, context, longest, of_exits, after) if exits else None, together, start,
    )  # fmt: skip


def _line(one: float, all: float, longest: int) -> tuple[float, float]:
    """Return (cost beside the steps, at most half the longest draft's; cost of a step) of a draft."""
    start = min(max(0.0, (longest * one - all) / (longest - 1)), all / 2) if longest > 1 else 0.0
    return start, (all - start) / longest


def _parts(alone: Sequence[float], whole: float) -> tuple[list[float], float]:
    """Return (own cost of each kind of sub-layer, joint cost of all); they sum to `whole`."""
    total = sum(alone)
    shares = [part / total if total else 1 / len(alone) for part in alone]
    beyond = (whole - total) / (1 - sum(share**2 for share in shares)) if max(shares) < 1 else 0.0
    together = min(max(0.0, beyond), whole / 2)
    return [share * (whole - together) for share in shares], together


def _timed(
    bare: BareForwards, works: Mapping[Any, Work], repeats: int, after: Callable[[], None]
) -> tuple[dict[Any, list[float]], float]:
    """Return what works take, in plain steps of the same turns, and the seconds of a plain step."""
    turns = TimedTurns({"step": bare.verify(1), **works}, bare.cache.device, settle=0.0)
    for turn in range(-1, repeats):  # the first one warms up
        turns.take(counts=turn >= 0)
        after()
    plain = turns.seconds["step"]
    return {
        work: [own / step for own, step in zip(turns.seconds[work], plain, strict=True)] for work in works
    }, median(plain)


def _draws(loaded: Loaded, context: int, longest: int, temperature: float) -> Callable[[], TimedDraws]:
    """Return a function that makes the draws of a draft at this temperature, as the engine draws."""
    device, vocab_ops = loaded.engine.device, loaded.engine.vocab_ops
    table = SamplingTable.of([SamplingParams(temperature=temperature)], device, vocab_ops=vocab_ops)
    noise, zero = Noise(), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.arange(context, context + longest, device=device)[None]  # [1, K]

    def draws() -> TimedDraws:
        keys = NoiseKeys(zero, places, None, zero, vocab_ops)

        def draw(column: int, logits: Tensor) -> Tensor:
            pick = partial(noise.pick, keys=keys.column(column), purpose=DRAFT)
            return distribution_of(logits, table)[0].draw(pick)

        return TimedDraws(None if table.all_greedy else table.sampling_inputs(keys.bits(DRAFT)), draw)

    return draws


TAU_TOLERANCE = 0.03  # of τ: a plan is kept only if its decoded and predicted τ differ by no more
SIGNIFICANCE = 1 / 60  # of the sign test, per finalist: about 1 in 20 for three finalists


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan, scored on the calibration texts."""

    number: int  # number of the trial in the study
    skips: str  # the plan, in the notation of `Skips`
    predicted: float  # predicted speed-up at the best draft length
    draft: int  # the best draft length
    taus: tuple[float, ...]  # τ at draft lengths 1, 2, ..
    origin: str | None = None  # name of the seed plan; None for a plan that the sampler proposed


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan in real decoding of held-out prompts, in turns with plain decoding."""

    skips: str  # the plan, in the notation of `Skips`
    draft: int  # draft length
    predicted: float  # speed-up that the trial predicted
    predicted_tau: float  # τ that teacher forcing predicts for the decoded texts
    tau: float  # τ of decoding
    alpha: float  # α of decoding
    c: float  # cost of a draft token, in plain steps, from a bare round without its verifying pass
    speedup: Spread  # speed-up over plain decoding: medians within a prompt's repeats, over the prompts
    identical: bool | None  # all tokens equal plain decoding's; None at a temperature above 0
    prompts: int  # number of prompts decoded
    repeated: Spread  # share of 4-grams that occurred before in the same output
    faster: int  # number of prompts on which the plan was faster, by the medians of `speedup`
    trial_tau: float  # τ on the calibration texts, from which `predicted` comes
    tau_error: float = 0.0  # standard error of `tau` ÷ `tau`; 0 at temperature 0

    @property
    def figures(self) -> tuple[float, ...]:
        """The figures of its line in a table, beside its speed."""
        return self.predicted, self.c, self.alpha, self.tau, self.predicted_tau, self.trial_tau

    @property
    def objection(self) -> str | None:
        """The reason not to keep the plan, or None.

        A plan must beat plain decoding by a sign test over the prompts: on all of six, or on 13 of 16.
        """
        if self.identical is False:
            return "its tokens differ from plain decoding's"
        if Skips.parse(self.skips) == Skips():
            return "it skips nothing, so it cannot be faster than plain decoding"
        if self.speedup.median <= 1:
            return "it is not faster than plain decoding"
        if sign_test(self.prompts, self.prompts) > SIGNIFICANCE:
            return f"{self.prompts} held-out prompt(s) are too few to rule out chance; give more prompts"
        if sign_test(self.faster, self.prompts) > SIGNIFICANCE:
            return (
                f"it is faster than plain decoding on only {self.faster} of {self.prompts} held-out prompts,"
                " which may be chance"
            )
        if abs(self.predicted_tau / self.tau - 1) > TAU_TOLERANCE:
            return f"its tau in decoding is {self.tau:.2f}, but the predicted one is {self.predicted_tau:.2f}"
        if self.tau_error > TAU_TOLERANCE / 2:
            return (
                f"its tau is accurate to {2 * self.tau_error:.0%} only; give more prompts, or more new tokens"
                " per prompt"
            )
        return None


def sign_test(wins: int, prompts: int) -> float:
    """Return the probability of this many wins or more if each prompt is won with probability 1/2."""
    return sum(comb(prompts, count) for count in range(wins, prompts + 1)) * 0.5**prompts


@dataclass(frozen=True, slots=True)
class TuneReport:
    """A search."""

    model: str  # name of the model
    model_hash: str  # hash of the model (`plan_files.model_hash`)
    layers: int  # number of layers of the model
    study: str  # name of the study
    storage: str  # where the study is, without a password
    options: dict[str, Any]  # names and plain values
    machine: dict[str, Any]  # names and plain values
    tokens: int  # new tokens of the calibration texts
    costs: PlanCosts  # costs on which predictions rest
    trials: tuple[Trial, ...]  # all completed trials of the study
    importance: dict[str, float]  # share of each sub-layer in the differences between trials
    finalists: tuple[Finalist, ...] = ()  # the best plans in real decoding
    winner: int | None = None  # index among the finalists; None if no plan won or none was timed
    plan_files: tuple[str, ...] = ()  # files to which the winner was written
    seconds: dict[str, float] = field(default_factory=dict)  # duration of each stage
    finished: bool = True  # False if the search was interrupted
    notes: tuple[str, ...] = ()  # further remarks for a reader
    unwritten: tuple[str, ...] = ()  # for each file that could not be written, the reason

    @property
    def best(self) -> Trial:
        """The trial with the highest predicted speed-up."""
        return max(self.trials, key=lambda trial: (trial.predicted, -trial.number))

    @property
    def objections(self) -> str:
        """The objections to all finalists, as sentences."""
        return " ".join(f"{one.skips}: {one.objection}." for one in self.finalists if one.objection)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the speeds deserve no trust, in sentences; empty if nothing speaks against them."""
        doubt = load_doubt(self.machine)
        return () if doubt is None else (doubt,)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without NaN."""
        finalists = [asdict(one) | {"objection": one.objection} for one in self.finalists]
        return asdict(self) | {"finalists": finalists}
