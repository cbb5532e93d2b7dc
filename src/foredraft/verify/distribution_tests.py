"""Chi-square tests of sampled tokens against the target's exact distribution.

All samples of a test continue one prompt by `len(WIDTHS)` tokens. Drafts are up to `len(WIDTHS) - 1` tokens
long, so accepted tokens, corrections at every position and the bonus token all occur at the tested positions.
Expected probabilities come from plain forwards of the target: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.decode.stats import Stats
from foredraft.llm import Output
from foredraft.verify import chi_square
from foredraft.verify.cells import Cells
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.positions import PositionCounts
from foredraft.verify.sampler import TREE_WIDTHS, WIDTHS, Sampler, SamplingCase
from foredraft.verify.sampling_settings import Rule, Setting
from foredraft.verify.verify_records import DistributionTest

__all__ = ["POWER", "DistributionCheck", "run_test"]

POWER = 0.9  # probability of detection that a test's `detectable` distance has


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """What one test samples, and how strictly it judges.

    Attributes:
        case: The prompt, its sampling parameters and the draft temperature.
        rule: The acceptance rule.
        setting: The sampling parameters in short.
        full: The test has to detect the distance that the user asks for.
        by_position: Tokens are tested by draft position too.
        level: Significance level of the joint test, and of each position's.
    """

    case: SamplingCase
    rule: Rule
    setting: Setting
    full: bool
    by_position: bool
    level: float


@dataclass(slots=True)
class _Counts:
    """The samples of a test, counted by cell and by draft position.

    Nothing of a single sample is kept. Even a small object that stays holds the pages around it, which the
    next round's tables over the vocabulary can then not use: thousands of them cost gigabytes.
    """

    cells: Cells
    positions: PositionCounts
    by_cell: list[int] = field(init=False)
    samples: int = 0
    stats: Stats = field(default_factory=Stats)
    errors: set[str] = field(default_factory=set)
    impossible: int = 0

    def __post_init__(self) -> None:
        self.by_cell = [0] * len(self.cells.probabilities)

    def add(self, outputs: Sequence[Output]) -> None:
        self.samples += len(outputs)
        self.stats = Stats.merge([self.stats, *(output.stats for output in outputs)])
        for output in outputs:
            self._count(output)

    def _count(self, output: Output) -> None:
        if output.error:
            self.errors.add(output.error)
        elif (cell := self.cells.of_sample(output.token_ids)) is None:
            self.impossible += 1
        else:
            self.by_cell[cell] += 1
            self.positions.add(output.token_ids, output.trace or [])


def run_test(
    sampler: Sampler,
    plain: PlainTarget,
    check: DistributionCheck,
    sample_count: Callable[[int], int],
    progress: Callable[[int, int], None],
) -> DistributionTest:
    """Sample continuations and test them against the target's distribution.

    Args:
        sampler: Draws the samples.
        plain: Computes the exact probabilities.
        check: What is tested.
        sample_count: Number of cells -> number of samples.
        progress: Called as (samples done, samples in all).
    """
    case = check.case
    next_token = plain.next_token(case.prompt, case.params)
    cells = Cells.of(next_token, WIDTHS)
    tree = Cells.of(next_token, TREE_WIDTHS) if check.by_position else cells
    size = sample_count(len(cells.probabilities))
    counts = _Counts(cells, PositionCounts(tree, len(WIDTHS) - 1))
    progress(0, size)
    for outputs in sampler.draw(case, size, trace=check.by_position):
        counts.add(outputs)
        progress(counts.samples, size)
    result = chi_square.pearson(counts.by_cell, cells.probabilities, size)
    if len(cells.probabilities) == 1:
        detectable = chi_square.detectable_probability(size, POWER)
    else:
        detectable = chi_square.detectable_distance(size, result.cells - 1, check.level, POWER)
    return DistributionTest(
        prompt=case.number,
        drafter=case.params.drafter or "none",
        acceptance=check.rule,
        setting=check.setting,
        draft_temperature=case.draft_temperature,
        full=check.full,
        samples=size,
        tokens=len(WIDTHS),
        cells=result.cells,
        statistic=result.statistic,
        p_value=0.0 if counts.impossible else result.p_value,
        level=check.level,
        detectable=detectable,
        impossible=counts.impossible,
        drafted=counts.stats.drafted,
        accepted=counts.stats.accepted,
        drafted_at=tuple(counts.stats.drafted_at),
        positions=tuple(counts.positions.tests(check.level, POWER)) if check.by_position else (),
        errors=tuple(sorted(counts.errors)),
    )
