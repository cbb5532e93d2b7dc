"""What a search found: records, for the command line, for the report, and for programs.

Contract: nothing here measures or prints. Costs are in plain steps of the target; words as in
docs/architecture.md. A figure that could not be had is None, never 0 or NaN.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from foredraft.bench.records import Spread
from foredraft.drafters.skips import Skips
from foredraft.tune.costs import PlanCosts

__all__ = ["AGREEMENT", "Finalist", "Report", "Trial", "by_chance"]

AGREEMENT = 0.03  # of predicted and decoded tau, in a plan that is kept
LEVEL = 1 / 60  # chance to keep a plan that is no faster: 1 in 20 for three finalists together


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan held against the texts. skips: as `Skips` spells them. predicted: the speed-up at its best
    draft length, `draft`. taus: at draft lengths from 1 on. origin: what plan it is, where the search began
    with it."""

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
        skips: As `Skips` spells them.
        draft: Its drafts' length.
        predicted: The speed-up that its trial predicted.
        predicted_tau: Of the very texts that were decoded, by a trial of every start.
        tau, alpha: Of the decoding.
        tau_error: The standard error of tau, by tau; 0 where nothing is drawn.
        c: Of a bare draft step.
        speedup: Over own plain decoding: medians within a prompt's repeats, over the prompts.
        identical: All tokens were plain decoding's, in every run; None where draws need not be the same.
        prompts: How many were decoded.
        repeated: Share of 4-grams that occurred before in the same output.
        faster: On how many prompts it was faster, by the medians of `speedup`.
        trial_tau: Of the texts of the search, which `predicted` comes from.
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
        """Why it is not to be kept, in words.

        It has to win beyond chance, by a sign test over the prompts: one that is as fast as plain decoding
        wins on half of them, and as often as this one did with a chance of at most `LEVEL`. That takes all of
        six prompts, or 13 of 16; by fewer than six nobody can tell.
        """
        if self.identical is False:
            return "its tokens are not plain decoding's"
        if Skips.spelled(self.skips) == Skips():
            return "it is the model itself, which cannot be faster than itself"
        if self.speedup.median <= 1:
            return "it is not faster than plain decoding"
        if by_chance(self.prompts, self.prompts) > LEVEL:
            return f"no speed can be told from chance on {self.prompts} held-out prompts; give more prompts"
        if by_chance(self.faster, self.prompts) > LEVEL:
            return (
                f"it is faster than plain decoding on {self.faster} of {self.prompts} held-out prompts, which"
                " may be chance"
            )
        if abs(self.predicted_tau / self.tau - 1) > AGREEMENT:
            return f"it decodes at a tau of {self.tau:.2f}, where trials say {self.predicted_tau:.2f}"
        if self.tau_error > AGREEMENT / 2:
            return (
                f"so few tokens tell its tau to {2 * self.tau_error:.0%} only; more prompts, or more new"
                " tokens of each, would"
            )
        return None


def by_chance(wins: int, prompts: int) -> float:
    """How likely somebody who wins each with a chance of one half wins so many or more."""
    return sum(comb(prompts, count) for count in range(wins, prompts + 1)) * 0.5**prompts


@dataclass(frozen=True, slots=True)
class Report:
    """A search. options, machine: names and plain values. model: its name. tokens: that a trial is held
    against. trials: all of the study that ended. importance: of each sub-layer's switch, by its name.
    winner: the place among the finalists of the plan that won, None where plain decoding did or none was
    timed. plan_files: where it was written to. seconds: of each stage. finished: False where it was
    interrupted. notes: what else a reader must know. unwritten: why a plan that won is not where it was to
    go."""

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
        """By its predicted speed-up."""
        return max(self.trials, key=lambda trial: (trial.predicted, -trial.number))

    @property
    def objections(self) -> str:
        """What spoke against each finalist."""
        return " ".join(f"{one.skips}: {one.objection}." for one in self.finalists if one.objection)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; holds no NaN."""
        told = [asdict(one) | {"objection": one.objection} for one in self.finalists]
        return asdict(self) | {"finalists": told}
