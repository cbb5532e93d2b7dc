"""What a verification found: records, for the command line and for programs.

A record judges itself. A failure is a fact; *inconclusive* means that nothing failed, but that a difference
worth finding could have been missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Divergence", "Identity", "LawTest", "Report", "Verdict"]

Verdict = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an output at temperature 0 first leaves plain decoding's.

    position: among the new tokens, from 0. expected, found: None where that output had ended.
    best, logits: the target's two best tokens there, read plainly after the common prefix.
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
        return self.logits[0] - self.logits[1]


@dataclass(frozen=True, slots=True)
class Identity:
    """Temperature 0 against plain decoding at batch 1. runs: (drafter, batched), each over every prompt."""

    prompts: int
    tokens: int  # of plain decoding, over all prompts
    runs: tuple[tuple[str, bool], ...]
    drafted: int
    divergences: tuple[Divergence, ...]
    errors: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.divergences and not self.errors

    def diverged(self, drafter: str, batched: bool) -> int:
        return sum((d.drafter, d.batched) == (drafter, batched) for d in self.divergences)


@dataclass(frozen=True, slots=True)
class LawTest:
    """A chi-square test of `samples` continuations of one prompt against the target's exact joint law.

    cells: after merging. detectable: the least total variation over the cells that it finds with the
    report's power. impossible: samples that the law rules out; a single one fails the test.
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
        return self.drafter == "none"

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level and not self.impossible and not self.errors


@dataclass(frozen=True, slots=True)
class Report:
    """about: what was tested, and on what. detect: the total variation that must not be missed.

    power: of `detectable` in every test. family_level: the probability that any test of a lossless set-up
    fails. planted: the defect that was planted to see it found, if one was.
    """

    about: dict[str, Any]
    seed: int
    identity: Identity
    tests: tuple[LawTest, ...]
    detect: float
    power: float
    family_level: float
    planted: str | None = None

    @property
    def detectable(self) -> float:
        """Of the weakest of the drafter's tests."""
        return max(test.detectable for test in self.tests if not test.control)

    @property
    def doubts(self) -> list[str]:
        """Why a difference could have been missed."""
        return list(self._doubts())

    def _doubts(self) -> Iterator[str]:
        if self.detectable > self.detect:
            yield (
                f"a total variation below {self.detectable:.4f} could have been missed, and {self.detect:g}"
                " must not be; take more samples, or prompts whose continuation is less certain"
            )
        if self.about["max_batch"] < 2:
            yield "there was room for one sequence, so no two shared a batch; raise max_batch"
        if not self.identity.drafted:
            yield "nothing was drafted at temperature 0; take other prompts, or more tokens"
        silent = sum(not test.drafted for test in self.tests if not test.control)
        if silent:
            yield f"nothing was drafted in {silent} of the sampled tests; take other prompts"

    @property
    def found_planted(self) -> bool:
        """Whether a test of the rule that holds the planted defect failed, and no control did."""
        if self.identity.errors or any(test.errors for test in self.tests):
            return False  # what broke off for another reason shows nothing
        failed = [test for test in self.tests if not test.passed]
        hit = any(test.acceptance == "speculative" and not test.control for test in failed)
        return hit and not any(test.control for test in failed)

    @property
    def verdict(self) -> Verdict:
        """With a planted defect: failed = it was found, as it must be."""
        if self.planted is not None:
            return "failed" if self.found_planted else "inconclusive"
        if not self.identity.passed or not all(test.passed for test in self.tests):
            return "failed"
        return "inconclusive" if self.doubts else "passed"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the records, and what they say of themselves. Holds no NaN."""
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
