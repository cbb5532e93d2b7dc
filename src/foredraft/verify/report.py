"""Records of a verification, for the command line and for programs.

The verdict is *failed* if a check found a difference, *inconclusive* if none did but the evidence is weak,
and *passed* otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["DistributionTest", "Divergence", "Identity", "Report", "Verdict"]

Verdict = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between an output at temperature 0 and plain decoding.

    Attributes:
        prompt: Number of the prompt.
        drafter: The run's drafter; "none" is plain decoding.
        batched: The run decoded all prompts in one batch.
        position: Position among the new tokens, from 0.
        expected: Plain decoding's token; None if its text had ended.
        found: The run's token; None if its text had ended.
        best: The target's two most likely tokens there, by plain forwards over the common prefix.
        logits: Logits of these two.
    """

    prompt: int
    drafter: str
    batched: bool
    position: int
    expected: int | None
    found: int | None
    best: tuple[int, int]
    logits: tuple[float, float]

    @property
    def margin(self) -> float:
        """Logit difference between the target's two most likely tokens."""
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True, slots=True)
class Identity:
    """Token identity at temperature 0, against plain decoding of one prompt at a time.

    Attributes:
        prompts: Number of prompts.
        tokens: Plain decoding's new tokens over all prompts.
        runs: (drafter, batched) of each run that was compared, over every prompt.
        drafted: Drafted tokens over all runs.
        divergences: First difference of every output that differs.
        errors: Requests that failed.
    """

    prompts: int
    tokens: int
    runs: tuple[tuple[str, bool], ...]
    drafted: int
    divergences: tuple[Divergence, ...]
    errors: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.divergences and not self.errors

    def diverged(self, drafter: str, batched: bool) -> int:
        """Return the number of prompts on which a run differs."""
        return sum((d.drafter, d.batched) == (drafter, batched) for d in self.divergences)


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """A chi-square test of samples against the target's exact joint distribution.

    Attributes:
        prompt: Number of the prompt.
        drafter: The drafter; "none" is plain decoding, the control.
        acceptance: The acceptance rule.
        temperature: Sampling temperature.
        top_k: Sampling parameter; 0 is off.
        top_p: Sampling parameter; 1 is off.
        samples: Number of samples.
        positions: Tokens of each sample.
        cells: Number of cells after merging.
        statistic: Pearson's statistic.
        p_value: Its p-value; 0 if a sample was impossible.
        level: Significance level.
        detectable: Smallest total variation distance over the cells that the test detects with the report's
            `power`.
        impossible: Samples to which the target gives probability 0; one of them fails the test.
        drafted: Drafted tokens.
        accepted: Accepted tokens.
        errors: Errors of requests that failed, each once.
    """

    prompt: int
    drafter: str
    acceptance: str
    temperature: float
    top_k: int
    top_p: float
    samples: int
    positions: int
    cells: int
    statistic: float
    p_value: float
    level: float
    detectable: float
    impossible: int
    drafted: int
    accepted: int
    errors: tuple[str, ...]

    @property
    def control(self) -> bool:
        """Whether the samples come from plain decoding."""
        return self.drafter == "none"

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level and not self.impossible and not self.errors


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification.

    Attributes:
        about: What was tested (drafter, policy, dtype, ...) and where (versions, system).
        seed: Random seed of the samples.
        identity: Token identity at temperature 0.
        tests: The chi-square tests, controls last.
        detect: Total variation distance that each test of the drafter must detect.
        power: Probability with which a test detects its `detectable` distance.
        family_level: Probability that any of the tests fails although the set-up is lossless, at most.
        planted: The planted defect; None without a self-test.
    """

    about: dict[str, Any]
    seed: int
    identity: Identity
    tests: tuple[DistributionTest, ...]
    detect: float
    power: float
    family_level: float
    planted: str | None = None

    @property
    def detectable(self) -> float:
        """Total variation distance that every test of the drafter detects."""
        return max(test.detectable for test in self.tests if not test.control)

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
        if self.about["max_batch"] < 2:
            yield "the batch has room for one sequence only, so no two shared a batch; allow a larger batch"
        if not self.identity.drafted:
            yield "nothing was drafted at temperature 0; take other prompts, or more tokens"
        undrafted = sum(not test.drafted for test in self.tests if not test.control)
        if undrafted:
            yield f"nothing was drafted in {undrafted} of the chi-square tests; take other prompts"

    @property
    def found_planted(self) -> bool:
        """Whether a test of the rule with the planted defect failed, and no control did."""
        if self.identity.errors or any(test.errors for test in self.tests):
            return False  # a failed request is no evidence of the defect
        failed = [test for test in self.tests if not test.passed]
        hit = any(test.acceptance == "speculative" and not test.control for test in failed)
        return hit and not any(test.control for test in failed)

    @property
    def verdict(self) -> Verdict:
        """The outcome. With a planted defect, "failed" means that the tests found it, as they must."""
        if self.planted is not None:
            return "failed" if self.found_planted else "inconclusive"
        if not self.identity.passed or not all(test.passed for test in self.tests):
            return "failed"
        return "inconclusive" if self.doubts else "passed"

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON, with its verdicts. It contains no NaN."""
        identity = asdict(self.identity) | {"passed": self.identity.passed}
        identity["runs"] = [{"drafter": name, "batched": batched} for name, batched in self.identity.runs]
        identity["divergences"] = [asdict(d) | {"margin": d.margin} for d in self.identity.divergences]
        figures: dict[str, Any] = {
            "verdict": self.verdict,
            "about": self.about,
            "seed": self.seed,
            "identity": identity,
            "tests": [asdict(test) | {"control": test.control, "passed": test.passed} for test in self.tests],
            "detect": self.detect,
            "detectable": self.detectable,
            "power": self.power,
            "family_level": self.family_level,
            "doubts": self.doubts,
        }
        if self.planted is not None:
            figures |= {"planted": self.planted, "found_planted": self.found_planted}
        return figures
