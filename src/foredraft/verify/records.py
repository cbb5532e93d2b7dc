"""Records of a verification's checks: comparisons of texts, and chi-square tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foredraft.verify.settings import Rule, Setting

__all__ = ["DistributionTest", "Divergence", "DraftPosition", "Identity"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between an output and plain decoding.

    Attributes:
        prompt: Number of the prompt.
        drafter: The run's drafter; "none" is plain decoding.
        batched: The run decoded all prompts in one batch.
        seed: Of the text; None at temperature 0.
        position: Position among the new tokens, from 0.
        expected: Plain decoding's token; None if its text had ended.
        found: The run's token; None if its text had ended.
        best: The target's two most likely tokens there, by plain forwards over the common prefix, before
            penalties and noise.
        logits: Logits of these two.
    """

    prompt: int
    drafter: str
    batched: bool
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


@dataclass(frozen=True, slots=True)
class Identity:
    """Token identity with one setting, against plain decoding of one prompt at a time.

    Attributes:
        setting: Sampling parameters.
        acceptance: "coupled" for seeded texts; None at temperature 0, where the rules agree.
        prompts: Number of prompts.
        tokens: Plain decoding's new tokens over all prompts.
        runs: (drafter, batched) of each run that was compared, over every prompt.
        drafted: Drafted tokens over all runs.
        divergences: First difference of every output that differs.
        errors: Requests that failed.
    """

    setting: Setting
    acceptance: Rule | None
    prompts: int
    tokens: int
    runs: tuple[tuple[str, bool], ...]
    drafted: int
    divergences: tuple[Divergence, ...]
    errors: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.divergences and not self.errors

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON, with its verdict."""
        figures = asdict(self) | {"passed": self.passed}
        figures["runs"] = [{"drafter": name, "batched": batched} for name, batched in self.runs]
        figures["divergences"] = [asdict(each) | {"margin": each.margin} for each in self.divergences]
        return figures

    def diverged(self, drafter: str, batched: bool) -> int:
        """Return the number of prompts on which a run differs."""
        return sum((d.drafter, d.batched) == (drafter, batched) for d in self.divergences)

    @property
    def drafter_diverged(self) -> bool:
        """Whether a run of the drafter differs."""
        return any(d.drafter != "none" for d in self.divergences)

    @property
    def control_diverged(self) -> bool:
        """Whether plain decoding in a batch differs."""
        return any(d.drafter == "none" for d in self.divergences)


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A chi-square test of the tokens that one position of a draft gave, given the text before them.

    Attributes:
        position: Position in the draft, from 0.
        bonus: It is the bonus token after a draft that was accepted whole, wherever that ended.
        tokens: Tokens that were tested: the accepted ones and the corrections, or the bonus tokens.
        corrections: How many of them are corrections.
        seen: Corrections, those after texts that are too rare to be tested included.
        degrees: Degrees of freedom.
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
    seen: int
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
    def passed(self) -> bool:
        return self.p_value >= self.level


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
        return self.joint_passed and all(position.passed for position in self.positions)

    def as_dict(self) -> dict[str, Any]:
        """Return the test for JSON, with its verdicts."""
        figures = asdict(self) | {"control": self.control, "passed": self.passed}
        figures["positions"] = [
            asdict(each) | {"detectable_correction": each.detectable_correction, "passed": each.passed}
            for each in self.positions
        ]
        return figures
