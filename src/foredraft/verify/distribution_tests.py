"""Chi-square tests of sampled tokens against the target's exact distribution: as a whole, and by draft
position.

A wrong correction shows where the drafter is often right and often wrong. So the last setting is tested with
a *stand-in*: the drafter itself at another temperature, or the target as its own drafter, whose q stays
exact.

Under a lossless rule, every token that a position of a draft gives, accepted or corrected, has the target's
distribution given the text before it, and so has the bonus token. The tokens of a position are counted by the
text s before them, as far as the cells separate it. Pearson's statistic is approximately chi-square for each
s, and so is the sum; with distance t_s after s, its noncentrality is at least sum 4 n_s t_s^2 >= 4 n t^2 by
Jensen's inequality. A joint test dilutes the same distance by all samples that do not reach the position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from foredraft.bench.settings import Rule, Setting
from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import RoundTrace, Stats
from foredraft.llm import Output
from foredraft.verify import chi_square
from foredraft.verify.chi_square import Cells, Prefix, detectable_distance, pearson, survival
from foredraft.verify.sampler import TARGET, TREE_WIDTHS, WIDTHS, PlainTarget, Sampler, SamplingCase
from foredraft.verify.verify_records import DistributionTest, DraftPosition


class PositionCounts:
    """Tokens of samples by draft position, the bonus token last."""

    def __init__(self, cells: Cells, positions: int) -> None:
        self._cells = cells
        # Of each position: (text before, number of the next cell) -> tokens, and text before -> corrections.
        self._tokens: list[Counter[tuple[Prefix, int]]] = [Counter() for _ in range(positions + 1)]
        self._corrections: list[Counter[Prefix]] = [Counter() for _ in range(positions + 1)]

    @property
    def corrections(self) -> list[int]:
        """Corrections at each draft position; 0 for the bonus token."""
        return [counts.total() for counts in self._corrections]

    @property
    def bonuses(self) -> int:
        return self._tokens[-1].total()

    def add(self, tokens: list[int], trace: list[RoundTrace]) -> None:
        """Count a sample's tokens as far as the cells separate the text before them."""
        for each in trace:
            drafted = len(each.draft)
            for at in range(min(each.accepted + 1, each.emitted) if drafted else 0):
                prefix = tuple(tokens[: each.start + at])
                if prefix not in self._cells.branches:
                    return
                position = at if at < drafted else -1
                self._tokens[position][prefix, self._cells.next_cell(prefix, tokens[each.start + at])] += 1
                self._corrections[position][prefix] += at == each.accepted < drafted

    def tests(self, level: float, power: float) -> Iterator[DraftPosition]:
        """Yield the test of every position at this level, without texts whose tokens make one cell only."""
        for position, (tokens, corrections) in enumerate(zip(self._tokens, self._corrections, strict=True)):
            degrees = tested = corrected = 0
            statistic = 0.0
            for prefix in dict.fromkeys(prefix for prefix, _ in tokens):
                probabilities = self._cells.next_probabilities(prefix)
                counts = [tokens[prefix, cell] for cell in range(len(probabilities))]
                result = pearson(counts, probabilities, sum(counts))
                if result.cells > 1:
                    degrees += result.cells - 1
                    statistic += result.statistic
                    tested += sum(counts)
                    corrected += corrections[prefix]
            yield DraftPosition(
                position=position,
                bonus=position == len(self._tokens) - 1,
                tokens=tested,
                corrections=corrected,
                degrees=degrees,
                statistic=statistic,
                p_value=survival(statistic, degrees),
                level=level,
                detectable=detectable_distance(tested, degrees, level, power),
            )


CANDIDATES = 40  # prompts that are considered, the first ones
STAND_IN_CANDIDATES = 8  # prompts that are considered for a stand-in
PROBES = 32  # samples per candidate that show at which positions its drafts are rejected
ENOUGH = 2  # corrections at every draft position, and bonus tokens, among the probes of a good case
# Draft temperatures of stand-ins, in the order in which they are tried. At 0.5, a drafter that is always
# right becomes one whose tokens are accepted about three times in four.
DRAFT_TEMPERATURES = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class _Probed:
    """A candidate and its probes."""

    case: SamplingCase  # the prompt and the drafter
    fewest: int  # corrections at the position with fewest, or bonus tokens if fewer; -1: nothing drafted

    @property
    def good(self) -> bool:
        return self.fewest >= ENOUGH


def choose_cases(
    sampler: Sampler,
    plain: PlainTarget,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    count: int,
    progress: Callable[[int, int], None],
) -> list[SamplingCase]:
    """Choose the prompts on which a defect shows most clearly with the drafter as it is.

    Prompts with corrections at every draft position and whole drafts come first, then those of higher
    entropy. The probes for this use seeds that no test uses.
    """
    cases = [SamplingCase(number, prompt, params) for number, prompt in enumerate(prompts[:CANDIDATES])]
    cells: dict[int, Cells] = {}
    for case in cases:
        cells[case.number] = Cells.of(plain.next_token(case.prompt, params), TREE_WIDTHS)
        progress(len(cells), len(cases))
    probed: list[_Probed] = []
    for case in sorted(cases, key=lambda case: -cells[case.number].entropy):
        if sum(each.good for each in probed) < count:
            probed.append(_probe(sampler, case, cells[case.number]))
    # stable: by entropy among equals, as among good ones
    probed.sort(key=lambda each: (not each.good, 0 if each.good else -each.fewest))
    return [each.case for each in probed][:count]


def choose_stand_in(
    sampler: Sampler, plain: PlainTarget, prompts: Sequence[list[int]], params: SamplingParams
) -> SamplingCase | None:
    """Choose a stand-in for the drafter, and a prompt for it."""
    cases = [
        SamplingCase(number, prompt, params) for number, prompt in enumerate(prompts[:STAND_IN_CANDIDATES])
    ]
    cells = [Cells.of(plain.next_token(case.prompt, params), TREE_WIDTHS) for case in cases]
    best: _Probed | None = None
    for stand_in_params, temperature in _stand_ins(sampler, params):
        for case in sorted(cases, key=lambda case: -cells[case.number].entropy):
            stand_in = replace(case, params=stand_in_params, draft_temperature=temperature)
            probed = _probe(sampler, stand_in, cells[case.number])
            if best is None or probed.fewest > best.fewest:
                best = probed
        if best is not None and best.good:
            break
    return None if best is None else best.case


def _stand_ins(sampler: Sampler, own: SamplingParams) -> Iterator[tuple[SamplingParams, float]]:
    """Yield parameters with a drafter, and draft temperatures; own: those of the drafter as it is."""
    target = own.replace(drafter=TARGET)
    for params in (own, target):
        if sampler.draws(params):
            yield from ((params, temperature) for temperature in DRAFT_TEMPERATURES)
        elif params is target:  # greedy drafts, where the target often draws another than the likeliest token
            yield params, 1.0


def _probe(sampler: Sampler, case: SamplingCase, cells: Cells) -> _Probed:
    counts = PositionCounts(cells, len(TREE_WIDTHS) - 1)
    outputs = [output for batch in sampler.draw(case, PROBES, trace=True) for output in batch]
    for output in outputs:
        counts.add(output.token_ids, output.trace or [])
    longest = len(Stats.merge(output.stats for output in outputs).drafted_at)
    return _Probed(case, min(*counts.corrections[:longest], counts.bonuses) if longest else -1)


POWER = 0.9  # probability of detection that a test's `detectable` distance has


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """What one test samples, and how strictly it judges."""

    case: SamplingCase  # the prompt, its sampling parameters and the draft temperature
    rule: Rule  # the acceptance rule
    setting: Setting  # the sampling parameters in short
    full: bool  # the test has to detect the distance that the user asks for
    by_position: bool  # tokens are tested by draft position too
    level: float  # significance level of the joint test, and of each position's


@dataclass(slots=True)
class _Counts:
    """The samples of a test, counted by cell and by draft position.

    Nothing of a single sample is kept: small objects that stay hold pages that the next round's tables then
    cannot use.
    """

    cells: Cells
    positions: PositionCounts
    by_cell: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    stats: Stats = field(default_factory=Stats)
    errors: set[str] = field(default_factory=set)
    impossible: int = 0

    def add(self, outputs: Sequence[Output]) -> None:
        self.samples += len(outputs)
        self.stats = Stats.merge([self.stats, *(output.stats for output in outputs)])
        for output in outputs:
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
    """Sample continuations and test them against the target's distribution."""
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
    by_cell = [counts.by_cell[cell] for cell in range(len(cells.probabilities))]
    result = chi_square.pearson(by_cell, cells.probabilities, size)
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
