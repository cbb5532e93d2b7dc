"""Records of a verification's checks, and its report, for the command line and for programs.

The verdict is *failed* if a check found a difference, *inconclusive* if none did but the evidence is weak,
and *passed* otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from foredraft.bench.settings import DEFECTS, Rule, Setting

ALWAYS = "drafting always"  # of runs in which every round drafts


class TextRun(NamedTuple):
    """One run over the prompts of a comparison of texts."""

    drafter: str  # its drafter; "none" is plain decoding
    batched: bool  # it decodes all prompts in one batch
    always: bool = False  # every round drafts, although the policy would draft only where it pays

    def __str__(self) -> str:
        """Return the run in words."""
        always = f", {ALWAYS}" if self.always else ""
        return f"{self.drafter}{always}, {'in a batch' if self.batched else 'one at a time'}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between an output and plain decoding."""

    prompt: int  # number of the prompt
    run: TextRun  # the run that differs
    seed: int | None  # of the text; None at temperature 0
    position: int  # position among the new tokens, from 0
    expected: int | None  # plain decoding's token; None if its text had ended
    found: int | None  # the run's token; None if its text had ended
    best: tuple[int, int]  # the target's two most likely tokens there, before penalties and noise
    logits: tuple[float, float]  # logits of these two

    @property
    def margin(self) -> float:
        """Logit difference between the target's two most likely tokens."""
        return self.logits[0] - self.logits[1]

    def as_dict(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self).items() if name != "run"}
        return figures | {"margin": self.margin} | self.run._asdict()


@dataclass(frozen=True, slots=True)
class Identity:
    """Token identity with one setting, against plain decoding of one prompt at a time."""

    setting: Setting  # sampling parameters
    acceptance: Rule | None  # "coupled" for seeded texts; None at temperature 0, where the rules agree
    prompts: int  # number of prompts
    tokens: int  # plain decoding's new tokens over all prompts
    runs: tuple[TextRun, ...]  # the runs that were compared, each over every prompt
    drafted: int  # drafted tokens over all runs
    divergences: tuple[Divergence, ...]  # first difference of every output that differs
    errors: tuple[str, ...]  # requests that failed

    @property
    def passed(self) -> bool:
        return not self.divergences and not self.errors

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON, with its verdict."""
        runs = [run._asdict() for run in self.runs]
        divergences = [each.as_dict() for each in self.divergences]
        return asdict(self) | {"passed": self.passed, "runs": runs, "divergences": divergences}

    def diverged(self, run: TextRun) -> int:
        """Return the number of prompts on which a run differs."""
        return sum(found.run == run for found in self.divergences)

    def any_diverged(self, *, control: bool) -> bool:
        """Return whether a run of the drafter differs, or, control, of plain decoding in a batch."""
        return any((found.run.drafter == "none") is control for found in self.divergences)


# Of tables: what a line tells of a position in a draft, and of a test beside its prompt, drafter, rule and
# setting; the last cell is the outcome.
POSITIONS = ("position", "tokens", "corrected", "chi2", "df", "p-value", "detects", "if corrected", "")
TESTS = ("samples", "cells", "chi2", "p-value", "detects", "accepted", "")
NONE, PASSED, FAILED, TOO_FEW = "-", "ok", "FAILED", "too few"


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A chi-square test of the tokens that one position of a draft gave, given the text before them."""

    position: int  # position in the draft, from 0
    bonus: bool  # it is the bonus token after a draft that was accepted whole, wherever that ended
    tokens: int  # tokens that were tested: the accepted ones and the corrections, or the bonus tokens
    corrections: int  # how many of them are corrections
    degrees: int  # degrees of freedom; 0 where there were too few tokens for a test
    statistic: float  # Pearson's statistic, summed over the texts before
    p_value: float  # its p-value
    level: float  # significance level
    # smallest total variation distance of these tokens from the target's distribution, averaged over the
    # texts before them, that the test detects with the report's `power`; 1 is none
    detectable: float

    @property
    def detectable_correction(self) -> float:
        """Smallest such distance of the corrections alone, if the accepted tokens are right; 1 is none."""
        return min(1.0, self.detectable * self.tokens / self.corrections) if self.corrections else 1.0

    @property
    def tested(self) -> bool:
        """Whether there were tokens enough for a test."""
        return self.degrees > 0

    @property
    def failed(self) -> bool:
        return self.p_value < self.level

    @property
    def passed(self) -> bool:
        """Whether there was a test, and it found nothing."""
        return self.tested and not self.failed

    @property
    def line(self) -> tuple[str, ...]:
        """Its line under `POSITIONS`."""
        place = "bonus" if self.bonus else str(self.position + 1)
        corrected = NONE if self.bonus else str(self.corrections)
        figures: tuple[str, ...] = (NONE, str(self.degrees), NONE, NONE, NONE, TOO_FEW)
        if self.tested:
            figures = (
                *(
                    f"{self.statistic:.2f}",
                    str(self.degrees),
                    f"{self.p_value:.2g}",
                    f"{self.detectable:.4f}",
                ),
                f"{self.detectable_correction:.4f}" if self.corrections else NONE,
                FAILED if self.failed else PASSED,
            )
        return place, str(self.tokens), corrected, *figures


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """A chi-square test of samples against the target's exact joint distribution."""

    prompt: int  # number of the prompt
    drafter: str  # the drafter; "none" is plain decoding, the control
    acceptance: Rule  # the acceptance rule
    setting: Setting  # sampling parameters
    draft_temperature: float  # divides the drafter's logits; above 1 it weakens the drafter
    full: bool  # has the samples that the report's `detect` needs, or that the user asks for
    samples: int  # number of samples
    tokens: int  # tokens of each sample
    cells: int  # number of cells after merging
    statistic: float  # Pearson's statistic
    p_value: float  # its p-value; 0 if a sample was impossible
    level: float  # significance level
    # smallest total variation distance over the cells that the test detects with the report's `power`
    detectable: float
    impossible: int  # samples to which the target gives probability 0; one of them fails the test
    drafted: int  # drafted tokens
    accepted: int  # accepted tokens
    drafted_at: tuple[int, ...]  # drafts that had a token at each position
    positions: tuple[DraftPosition, ...]  # by draft position, the bonus token last; may be empty
    errors: tuple[str, ...]  # errors of requests that failed, each once

    @property
    def control(self) -> bool:
        """Whether the samples come from plain decoding."""
        return self.drafter == "none"

    @property
    def joint_passed(self) -> bool:
        """Whether the joint distribution passed."""
        return self.p_value >= self.level and not self.impossible and not self.errors

    @property
    def passed(self) -> bool:
        """Whether no test failed. Of a position that was not tested nothing is known (`Report.doubts`)."""
        return self.joint_passed and not any(position.failed for position in self.positions)

    @property
    def described_drafter(self) -> str:
        """The drafter, and how it was weakened."""
        weaker = f", logits / {self.draft_temperature:g}" if self.draft_temperature != 1 else ""
        return "none (control)" if self.control else self.drafter + weaker

    @property
    def line(self) -> tuple[str, ...]:
        """Its line under `TESTS`."""
        accepted = f"{self.accepted / self.drafted:.0%}" if self.drafted else NONE
        failed = f"{self.impossible} impossible" if self.impossible else FAILED
        return (
            *(str(self.samples), str(self.cells), f"{self.statistic:.2f}", f"{self.p_value:.2g}"),
            *(f"{self.detectable:.4f}", accepted, PASSED if self.joint_passed else failed),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the test for JSON, with its verdicts."""
        shown = ("detectable_correction", "tested", "passed")
        positions = [asdict(each) | {name: getattr(each, name) for name in shown} for each in self.positions]
        return asdict(self) | {"control": self.control, "passed": self.passed, "positions": positions}


Verdict = Literal["passed", "failed", "inconclusive"]
MEANINGS: dict[Verdict, str] = {
    "passed": "no difference from plain decoding was found.",
    "failed": "the output differs from plain decoding's, or a request failed.",
    "inconclusive": "no difference was found, but one could have been missed.",
}
# Corrections at a draft position below which the tests have hardly seen it. The report states the power of
# the others.
FEWEST_CORRECTIONS = 5


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification."""

    about: dict[str, Any]  # what was tested (drafter, policy, dtype, ...) and where (versions, system)
    seed: int  # random seed of the samples
    identities: tuple[Identity, ...]  # token identity, at temperature 0 first
    tests: tuple[DistributionTest, ...]  # the chi-square tests, controls last
    detect: float  # total variation distance that each full test of the drafter must detect
    power: float  # probability with which a test detects its `detectable` distance
    family_level: float  # probability that any of the tests fails although the set-up is lossless, at most
    planted: str | None = None  # name of the planted defect; None without a self-test

    @property
    def detectable(self) -> float:
        """Total variation distance that every full test of the drafter detects; 1 if none is full."""
        return max((test.detectable for test in self.tests if test.full), default=1.0)

    @property
    def best_by_position(self) -> list[DraftPosition]:
        """For each draft position, the test that detects the smallest distance of the corrections there.

        Positions without a corrected token, and bonus tokens, are left out.
        """
        tested = [[each for each in tests if each.corrections] for tests in self._positions]
        return [
            min(tests, key=lambda each: each.detectable_correction)
            for tests in tested
            if tests and not tests[0].bonus
        ]

    @property
    def _positions(self) -> list[tuple[DraftPosition, ...]]:
        """The tests of each draft position that drafts reach, and last those of the bonus token."""
        longest = max((len(test.drafted_at) for test in self.tests if test.positions), default=0)
        by_position = zip(*(test.positions for test in self.tests if test.positions), strict=True)
        return [tests for tests in by_position if tests[0].bonus or tests[0].position < longest]

    @property
    def doubts(self) -> list[str]:
        """Reasons why the evidence is weak."""
        untested, blind = list[str](), list[str]()
        for tests in self._positions:  # none of the tests had tokens enough, or hardly any saw a correction
            if not any(each.tested for each in tests):
                untested.append("the bonus token" if tests[0].bonus else f"position {tests[0].position + 1}")
            elif not tests[0].bonus and sum(each.corrections for each in tests) < FEWEST_CORRECTIONS:
                blind.append(str(tests[0].position + 1))
        undrafted = sum(not test.drafted for test in self.tests if not test.control)
        reasons = (
            (
                self.detectable > self.detect,
                f"the tests detect a total variation distance of {self.detectable:.4f} at best, but"
                f" {self.detect:g} is required; take more samples, or prompts whose continuation is less"
                " certain",
            ),
            (
                untested,
                f"too few tokens for a test of {' and '.join(untested)}; take more samples, or other prompts",
            ),
            (
                blind,
                f"hardly any draft was corrected at position {' and '.join(blind)}; take more samples, or"
                " prompts on which the drafter is more often right and more often wrong",
            ),
            (
                self.about["max_batch"] < 2,
                "the batch has room for one sequence only, so no two shared a batch; allow a larger batch",
            ),
            (
                not self.identities[0].drafted,
                "nothing was drafted at temperature 0; take other prompts, or more tokens",
            ),
            (undrafted, f"nothing was drafted in {undrafted} of the chi-square tests; take other prompts"),
        )
        return [reason for holds, reason in reasons if holds]

    @property
    def found_planted(self) -> bool:
        """Whether a check that the planted defect breaks failed, and no other check did."""
        errors = [check.errors for check in self.identities] + [test.errors for test in self.tests]
        if self.planted is None or any(errors):
            return False  # a failed request is no evidence of the defect
        defect = DEFECTS[self.planted]
        # of every check that failed, whether the defect breaks it
        failed = [
            not control and defect.affects(each.acceptance, each.setting)
            for each in self.identities
            for control in (False, True)
            if each.any_diverged(control=control)
        ]
        failed += [
            not each.control and defect.affects(each.acceptance, each.setting)
            for each in self.tests
            if not each.passed
        ]
        return bool(failed) and all(failed)

    @property
    def verdict(self) -> Verdict:
        """The outcome. With a planted defect, "failed" means that the checks found it, as they must."""
        if self.planted is not None:
            return "failed" if self.found_planted else "inconclusive"
        if not all([check.passed for check in self.identities] + [test.passed for test in self.tests]):
            return "failed"
        return "inconclusive" if self.doubts else "passed"

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, with its verdicts. It contains no NaN."""
        figures: dict[str, Any] = {
            "verdict": self.verdict,
            "about": self.about,
            "seed": self.seed,
            "identities": [each.as_dict() for each in self.identities],
            "tests": [test.as_dict() for test in self.tests],
            "detect": self.detect,
            "detectable": self.detectable,
            "power": self.power,
            "family_level": self.family_level,
            "power_by_position": [
                {"position": each.position, "detectable_correction": each.detectable_correction}
                for each in self.best_by_position
            ],
            "doubts": self.doubts,
        }
        if self.planted is not None:
            figures |= {"planted": self.planted, "found_planted": self.found_planted}
        return figures
