"""The report of a verification, for the command line and for programs.

The verdict is *failed* if a check found a difference, *inconclusive* if none did but the evidence is weak,
and *passed* otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.verify.defects import DEFECTS
from foredraft.verify.verify_records import DistributionTest, DraftPosition, Identity

__all__ = ["Verdict", "VerifyReport"]

Verdict = Literal["passed", "failed", "inconclusive"]
# Corrections at a draft position below which the tests have hardly seen it. The report states the power of
# the others.
FEWEST_CORRECTIONS = 5


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        about: What was tested (drafter, policy, dtype, ...) and where (versions, system).
        seed: Random seed of the samples.
        identities: Token identity, at temperature 0 first.
        tests: The chi-square tests, controls last.
        detect: Total variation distance that each full test of the drafter must detect.
        power: Probability with which a test detects its `detectable` distance.
        family_level: Probability that any of the tests fails although the set-up is lossless, at most.
        planted: Name of the planted defect; None without a self-test.
    """

    about: dict[str, Any]
    seed: int
    identities: tuple[Identity, ...]
    tests: tuple[DistributionTest, ...]
    detect: float
    power: float
    family_level: float
    planted: str | None = None

    @property
    def detectable(self) -> float:
        """Total variation distance that every full test of the drafter detects; 1 if none is full."""
        return max((test.detectable for test in self.tests if test.full), default=1.0)

    @property
    def best_by_position(self) -> list[DraftPosition]:
        """For each draft position, the test that detects the smallest distance of the corrections there.

        Positions without a corrected token that was tested are left out (`doubts` names them), and so are
        bonus tokens, which no draft is judged by.
        """
        tested = [[each for each in tests if each.corrections] for tests in self._positions]
        return [
            min(tests, key=lambda each: each.detectable_correction)
            for tests in tested
            if tests and not tests[0].bonus
        ]

    @property
    def untested(self) -> list[DraftPosition]:
        """The draft positions, and the bonus token, of which no test had tokens enough."""
        return [tests[0] for tests in self._positions if not any(each.tested for each in tests)]

    @property
    def corrections_at(self) -> dict[int, int]:
        """Corrections that were tested at each draft position, over all tests."""
        return {
            tests[0].position: sum(each.corrections for each in tests)
            for tests in self._positions
            if not tests[0].bonus
        }

    @property
    def _positions(self) -> list[tuple[DraftPosition, ...]]:
        """The tests of each draft position that drafts reach, and last those of the bonus token."""
        longest = max((len(test.drafted_at) for test in self.tests if test.positions), default=0)
        by_position = zip(*(test.positions for test in self.tests if test.positions), strict=True)
        return [tests for tests in by_position if tests[0].bonus or tests[0].position < longest]

    @property
    def doubts(self) -> list[str]:
        """Reasons why the evidence is weak."""
        return list(self._doubts())

    def _doubts(self) -> Iterator[str]:
        if self.detectable > self.detect:
            yield (
                f"the tests detect a total variation distance of {self.detectable:.4f} at best, but"
                f" {self.detect:g} is required; take more samples, or prompts whose continuation is less"
                " certain"
            )
        untested = {each.position for each in self.untested}
        if untested:
            names = [
                "the bonus token" if each.bonus else f"position {each.position + 1}" for each in self.untested
            ]
            yield f"too few tokens for a test of {' and '.join(names)}; take more samples, or other prompts"
        blind = [
            str(position + 1)
            for position, corrected in self.corrections_at.items()
            if corrected < FEWEST_CORRECTIONS and position not in untested
        ]
        if blind:
            yield (
                f"hardly any draft was corrected at position {' and '.join(blind)}; take more samples, or"
                " prompts on which the drafter is more often right and more often wrong"
            )
        if self.about["max_batch"] < 2:
            yield "the batch has room for one sequence only, so no two shared a batch; allow a larger batch"
        if not self.identities[0].drafted:
            yield "nothing was drafted at temperature 0; take other prompts, or more tokens"
        undrafted = sum(not test.drafted for test in self.tests if not test.control)
        if undrafted:
            yield f"nothing was drafted in {undrafted} of the chi-square tests; take other prompts"

    @property
    def found_planted(self) -> bool:
        """Whether a check that the planted defect breaks failed, and no other check did."""
        errors = [check.errors for check in self.identities] + [test.errors for test in self.tests]
        if self.planted is None or any(errors):
            return False  # a failed request is no evidence of the defect
        defect = DEFECTS[self.planted]
        # (the defect breaks it, it failed) of every check
        checks = [
            (defect.affects(each.acceptance, each.setting), each.drafter_diverged) for each in self.identities
        ]
        checks += [(False, each.control_diverged) for each in self.identities]
        checks += [
            (not test.control and defect.affects(test.acceptance, test.setting), not test.passed)
            for test in self.tests
        ]
        failed = [breaks for breaks, has_failed in checks if has_failed]
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
