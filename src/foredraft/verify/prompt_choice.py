"""Prompt choice: the prompts and drafters with which the chi-square tests see most.

A wrong correction changes the distribution where the drafter is often right and often wrong. With a drafter
that is nearly always right no draft is corrected, and with a poor one no draft reaches its later positions.
So the last setting is tested with a *stand-in*: the drafter itself at another temperature, or the target as
its own drafter. With a sharper q the likely tokens, which the tests tell apart, are drafted too often and so
rejected often. q stays exact: the draft loop computes it from the logits that it draws by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.verify.cells import Cells
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.positions import PositionCounts
from foredraft.verify.sampler import TARGET, TREE_WIDTHS, Sampler, SamplingCase

__all__ = ["choose_cases", "choose_stand_in"]

CANDIDATES = 40  # prompts that are considered, the first ones
STAND_IN_CANDIDATES = 8  # prompts that are considered for a stand-in
PROBES = 32  # samples per candidate that show at which positions its drafts are rejected
ENOUGH = 2  # corrections at every draft position, and bonus tokens, among the probes of a good case
# Draft temperatures of stand-ins, in the order in which they are tried. At 0.5, a drafter that is always
# right becomes one whose tokens are accepted about three times in four.
DRAFT_TEMPERATURES = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class _Probed:
    """A candidate and its probes.

    Attributes:
        case: The prompt and the drafter.
        fewest: Corrections at the draft position that has fewest of them, or bonus tokens if these are fewer,
            as far as the cells separate the text before; -1 if nothing was drafted.
    """

    case: SamplingCase
    fewest: int

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

    Prompts are ranked by the entropy of their cells, because a nearly certain continuation hardly changes
    with a defect. Prompts with corrections at every draft position, and with drafts that are accepted whole,
    come first. The probes for this use seeds that no test uses.

    Args:
        sampler: Draws the probes.
        plain: Computes the exact probabilities.
        prompts: Token ids of each prompt; the first `CANDIDATES` are considered.
        params: Sampling parameters of the first test.
        count: Number of prompts to choose.
        progress: Called as (prompts done, prompts in all).

    Returns:
        `count` cases, or as many as there are prompts if these are fewer.
    """
    cases = [SamplingCase(number, prompt, params) for number, prompt in enumerate(prompts[:CANDIDATES])]
    cells: dict[int, Cells] = {}
    for case in cases:
        cells[case.number] = Cells.of(plain.next_token(case.prompt, params), TREE_WIDTHS)
        progress(len(cells), len(cases))
    good: list[SamplingCase] = []
    rest: list[_Probed] = []
    for case in sorted(cases, key=lambda case: -cells[case.number].entropy):
        if len(good) == count:
            break
        probed = _probe(sampler, case, cells[case.number])
        if probed.good:
            good.append(case)
        else:
            rest.append(probed)
    rest.sort(key=lambda probed: -probed.fewest)  # stable: by entropy among equals
    return [*good, *(probed.case for probed in rest)][:count]


def choose_stand_in(
    sampler: Sampler, plain: PlainTarget, prompts: Sequence[list[int]], params: SamplingParams
) -> SamplingCase | None:
    """Choose a stand-in for the drafter, and a prompt for it.

    Args:
        sampler: Draws the probes.
        plain: Computes the exact probabilities.
        prompts: Token ids of each prompt; the first `STAND_IN_CANDIDATES` are considered.
        params: Sampling parameters of its test.

    Returns:
        The best case of the first stand-in that has a good one, or else of all; None without a stand-in.
    """
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
        elif (
            params is target
        ):  # drafts are greedy, and the target often draws another token than the likeliest
            yield params, 1.0


def _probe(sampler: Sampler, case: SamplingCase, cells: Cells) -> _Probed:
    counts = PositionCounts(cells, len(TREE_WIDTHS) - 1)
    outputs = [output for batch in sampler.draw(case, PROBES, trace=True) for output in batch]
    for output in outputs:
        counts.add(output.token_ids, output.trace or [])
    longest = len(Stats.merge(output.stats for output in outputs).drafted_at)
    if not longest:
        return _Probed(case, -1)
    return _Probed(case, min(*counts.corrections[:longest], counts.bonuses))
