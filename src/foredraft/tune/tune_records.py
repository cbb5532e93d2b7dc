"""Records of a search, for the command line, the report and programs.

Costs are in plain steps of the target; the words are those of docs/architecture.md. A figure that could not
be measured is None, never 0 or NaN.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from foredraft.bench.bench_records import Spread, load_doubt
from foredraft.drafters.skips import Skips
from foredraft.tune.plan_costs import PlanCosts

__all__ = ["TAU_TOLERANCE", "Finalist", "Trial", "TuneReport", "sign_test"]

TAU_TOLERANCE = 0.03  # of τ: a plan is kept only if its decoded and predicted τ differ by no more
# Significance level of the sign test, per finalist: about 1 in 20 for three finalists together.
SIGNIFICANCE = 1 / 60


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan, scored on the calibration texts.

    Attributes:
        number: Number of the trial in the study.
        skips: The plan, in the notation of `Skips`.
        predicted: Predicted speed-up at the best draft length.
        draft: The best draft length.
        taus: τ at draft lengths 1, 2, ...
        origin: Name of the seed plan; None for a plan that the sampler proposed.
    """

    number: int
    skips: str
    predicted: float
    draft: int
    taus: tuple[float, ...]
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan in real decoding of held-out prompts, in turns with plain decoding.

    Attributes:
        skips: The plan, in the notation of `Skips`.
        draft: Draft length.
        predicted: Speed-up that the trial predicted.
        predicted_tau: τ that teacher forcing predicts for the decoded texts.
        tau: τ of decoding.
        alpha: α of decoding.
        c: Cost of a draft token, in plain steps, from a bare round without its verifying pass.
        speedup: Speed-up over plain decoding: medians within a prompt's repeats, over the prompts.
        identical: Whether all tokens of all runs equal plain decoding's; None at a temperature above 0.
        prompts: Number of prompts decoded.
        repeated: Share of 4-grams that occurred before in the same output.
        faster: Number of prompts on which the plan was faster, by the medians of `speedup`.
        trial_tau: τ on the calibration texts, from which `predicted` comes.
        tau_error: Standard error of `tau` ÷ `tau`; 0 at temperature 0.
    """

    skips: str
    draft: int
    predicted: float
    predicted_tau: float
    tau: float
    alpha: float
    c: float
    speedup: Spread
    identical: bool | None
    prompts: int
    repeated: Spread
    faster: int
    trial_tau: float
    tau_error: float = 0.0

    @property
    def objection(self) -> str | None:
        """The reason not to keep the plan, or None.

        A plan must beat plain decoding significantly, by a sign test over the prompts at level
        `SIGNIFICANCE`: on all of six prompts, or on 13 of 16. Fewer than six prompts cannot reach that
        level.
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
    """A search.

    Attributes:
        model: Name of the model.
        model_hash: Hash of the model (`plan_files.model_hash`).
        layers: Number of layers of the model.
        study: Name of the study.
        storage: Where the study is, without a password.
        options: Names and plain values.
        machine: Names and plain values.
        tokens: New tokens of the calibration texts.
        costs: Costs on which predictions rest.
        trials: All completed trials of the study.
        importance: Share of each sub-layer in the differences between trials, by "attention.3" or "mlp.3".
        finalists: The best plans in real decoding.
        winner: Index of the winner among the finalists; None if no plan won or none was timed.
        plan_files: Files to which the winner was written.
        seconds: Duration of each stage.
        finished: False if the search was interrupted.
        notes: Further remarks for a reader.
        unwritten: For each file that could not be written, the reason.
    """

    model: str
    model_hash: str
    layers: int
    study: str
    storage: str
    options: dict[str, Any]
    machine: dict[str, Any]
    tokens: int
    costs: PlanCosts
    trials: tuple[Trial, ...]
    importance: dict[str, float]
    finalists: tuple[Finalist, ...]
    winner: int | None
    plan_files: tuple[str, ...]
    seconds: dict[str, float]
    finished: bool = True
    notes: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()

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
