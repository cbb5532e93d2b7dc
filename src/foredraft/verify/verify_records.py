"""Records of a verification's checks: comparisons of texts, and chi-square tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from foredraft.verify.sampling_settings import Rule, Setting

__all__ = ["DistributionTest", "Divergence", "DraftPosition", "Identity", "TextRun"]


class TextRun(NamedTuple):
    """One run over the prompts of a comparison of texts.

    Attributes:
        drafter: Its drafter; "none" is plain decoding.
        batched: It decodes all prompts in one batch.
        always: Every round drafts, although the policy would draft only where it pays.
    """

    drafter: str
    batched: bool
    always: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between an output and plain decoding.

    Attributes:
        prompt: Number of the prompt.
        run: The run that differs.
        seed: Of the text; None at temperature 0.
        position: Position among the new tokens, from 0.
        expected: Plain decoding's token; None if its text had ended.
        found: The run's token; None if its text had ended.
        best: The target's two most likely tokens there, by plain forwards over the common prefix, before
            penalties and noise.
        logits: Logits of these two.
    """

    prompt: int
    run: TextRun
    seed: int | None
    position: int
    expected: int | None
    found: int | None
    best: tuple[int, int]
    logits: tuple[float, float]

    @property
    def margin(self) -> float:
        """Logit difference between the target's two most likely tokens."""
        return self.logits[0] - self.logits[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the divergence for JSON."""
        figures = asdict(self) | {"margin": self.margin}
        del figures["run"]
        return figures | self.run._asdict()


@dataclass(frozen=True, slots=True)
class Identity:
    """Token identity with one setting, against plain decoding of one prompt at a time.

    Attributes:
        setting: Sampling parameters.
        acceptance: "coupled" for seeded texts; None at temperature 0, where the rules agree.
        prompts: Number of prompts.
        tokens: Plain decoding's new tokens over all prompts.
        runs: The runs that were compared, each over every prompt.
        drafted: Drafted tokens over all runs.
        divergences: First difference of every output that differs.
        errors: Requests that failed.
    """

    setting: Setting
    acceptance: Rule | None
    prompts: int
    tokens: int
    runs: tuple[TextRun, ...]
    drafted: int
    divergences: tuple[Divergence, ...]
    errors: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.divergences and not self.errors

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON, with its verdict."""
        figures = asdict(self) | {"passed": self.passed}
        figures["runs"] = [run._asdict() for run in self.runs]
        figures["divergences"] = [each.as_dict() for each in self.divergences]
        return figures

    def diverged(self, run: TextRun) -> int:
        """Return the number of prompts on which a run differs."""
        return sum(found.run == run for found in self.divergences)

    @property
    def drafter_diverged(self) -> bool:
        """Whether a run of the drafter differs."""
        return any(found.run.drafter != "none" for found in self.divergences)

    @property
    def control_diverged(self) -> bool:
        """Whether plain decoding in a batch differs."""
        return any(found.run.drafter == "none" for found in self.divergences)


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A chi-square test of the tokens that one position of a draft gave, given the text before them.

    Attributes:
        position: Position in the draft, from 0.
        bonus: It is the bonus token after a draft that was accepted whole, wherever that ended.
        tokens: Tokens that were tested: the accepted ones and the corrections, or the bonus tokens.
        corrections: How many of them are corrections.
        degrees: Degrees of freedom; 0 where there were too few tokens for a test.
        statistic: Pearson's statistic, summed over the texts before.
        p_value: Its p-value.
        level: Significance level.
        detectable: Smallest total variation distance of these tokens from the target's distribution, averaged
            over the texts before them, that the test detects with the report's `power`; 1 is none.
    """

    position: int
    bonus: bool
    tokens: int
    corrections: int
    degrees: int
    statistic: float
    p_value: float
    level: float
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


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """A chi-square test of samples against the target's exact joint distribution.

    Attributes:
        prompt: Number of the prompt.
        drafter: The drafter; "none" is plain decoding, the control.
        acceptance: The acceptance rule.
        setting: Sampling parameters.
        draft_temperature: Divides the drafter's logits; above 1 it weakens the drafter.
        full: Has the samples that the report's `detect` needs, or that the user asks for.
        samples: Number of samples.
        tokens: Tokens of each sample.
        cells: Number of cells after merging.
        statistic: Pearson's statistic.
        p_value: Its p-value; 0 if a sample was impossible.
        level: Significance level.
        detectable: Smallest total variation distance over the cells that the test detects with the report's
            `power`.
        impossible: Samples to which the target gives probability 0; one of them fails the test.
        drafted: Drafted tokens.
        accepted: Accepted tokens.
        drafted_at: Drafts that had a token at each position.
        positions: Tests by draft position, the bonus token last; empty where there are none.
        errors: Errors of requests that failed, each once.
    """

    prompt: int
    drafter: str
    acceptance: Rule
    setting: Setting
    draft_temperature: float
    full: bool
    samples: int
    tokens: int
    cells: int
    statistic: float
    p_value: float
    level: float
    detectable: float
    impossible: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    positions: tuple[DraftPosition, ...]
    errors: tuple[str, ...]

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

    def as_dict(self) -> dict[str, Any]:
        """Return the test for JSON, with its verdicts."""
        figures = asdict(self) | {"control": self.control, "passed": self.passed}
        figures["positions"] = [
            asdict(each)
            | {
                "detectable_correction": each.detectable_correction,
                "tested": each.tested,
                "passed": each.passed,
            }
            for each in self.positions
        ]
        return figures
