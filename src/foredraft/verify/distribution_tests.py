"""Chi-square tests of sampled tokens against the target's exact joint distribution.

All samples of a test continue one prompt by `len(WIDTHS)` tokens. Drafts are up to `len(WIDTHS) - 1` tokens
long, so accepted tokens, corrections and the bonus token all occur at the tested positions. Expected
probabilities come from plain forwards of the target: nothing is estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.llm import LLM, Output
from foredraft.verify import chi_square
from foredraft.verify.cells import Cells
from foredraft.verify.plain_target import PlainTarget
from foredraft.verify.report import DistributionTest

__all__ = ["BATCH", "POWER", "WIDTHS", "Sampler", "SamplingCase", "choose_prompts", "run_test"]

# Separate tokens at each position. More cells need more samples: these widths make 7 cells; three tokens at
# each position make 40, and need 1.7 times the samples for the same distance.
WIDTHS = (2, 1, 1)
POWER = 0.9  # probability of detection that a test's `detectable` distance has
BATCH = 512  # samples per `generate` call; progress is reported, and the seed changes, between calls
CANDIDATES = 40  # prompts that `choose_prompts` considers, the first ones
PROBES = 16  # samples per candidate that show whether its drafts are both accepted and rejected


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """The samples of one test: a prompt and sampling parameters.

    Attributes:
        number: Number of the prompt.
        prompt: Token ids of the prompt.
        params: Sampling parameters, drafter and acceptance rule included.
    """

    number: int
    prompt: list[int]
    params: SamplingParams


class Sampler:
    """Draws continuations of `len(WIDTHS)` tokens. Every call to the model has a seed of its own.

    Args:
        llm: The loaded models.
        seed: The first seed; later calls take the next ones.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._seeds: Iterator[int] = itertools.count(seed)

    def draw(self, case: SamplingCase, count: int) -> Iterator[list[Output]]:
        """Yield `count` samples, up to `BATCH` at a time."""
        while count > 0:
            size = min(count, BATCH)
            params = replace(case.params, max_new_tokens=len(WIDTHS), seed=next(self._seeds), ignore_eos=True)
            yield self.llm.generate([case.prompt], params, n=size)
            count -= size


def run_test(
    sampler: Sampler,
    plain: PlainTarget,
    case: SamplingCase,
    *,
    level: float,
    sample_count: Callable[[int], int],
    progress: Callable[[int, int], None],
) -> DistributionTest:
    """Sample continuations and test them against the target's joint distribution.

    Args:
        sampler: Draws the samples.
        plain: Computes the exact probabilities.
        case: The prompt and how it is sampled.
        level: Significance level of the test.
        sample_count: Number of cells -> number of samples.
        progress: Called as (samples done, samples in all).
    """
    cells = Cells.of(plain.next_token(case.prompt, case.params), WIDTHS)
    size = sample_count(len(cells.probabilities))
    counts, impossible, errors = [0] * len(cells.probabilities), 0, []
    stats: list[Stats] = []
    progress(0, size)
    for outputs in sampler.draw(case, size):
        for output in outputs:
            stats.append(output.stats)
            if output.error:
                errors.append(output.error)
            elif (cell := cells.of_sample(output.token_ids)) is None:
                impossible += 1
            else:
                counts[cell] += 1
        progress(len(stats), size)
    result = chi_square.pearson(counts, cells.probabilities, size)
    if len(cells.probabilities) == 1:
        detectable = chi_square.detectable_probability(size, POWER)
    else:
        detectable = chi_square.detectable_distance(size, result.cells - 1, level, POWER)
    total = Stats.merge(stats)
    return DistributionTest(
        prompt=case.number,
        drafter=case.params.drafter or "none",
        acceptance=case.params.acceptance or "speculative",
        temperature=case.params.temperature,
        top_k=case.params.top_k,
        top_p=case.params.top_p,
        samples=size,
        positions=len(WIDTHS),
        cells=result.cells,
        statistic=result.statistic,
        p_value=0.0 if impossible else result.p_value,
        level=level,
        detectable=detectable,
        impossible=impossible,
        drafted=total.drafted,
        accepted=total.accepted,
        errors=tuple(dict.fromkeys(errors)),
    )


def choose_prompts(
    sampler: Sampler,
    plain: PlainTarget,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    count: int,
    progress: Callable[[int, int], None],
) -> list[int]:
    """Choose the prompts on which a defect shows most clearly.

    Prompts are ranked by the entropy of their cells, because a nearly certain continuation hardly changes
    with a defect. Prompts whose drafts are often accepted and often rejected come first: a wrong correction
    changes the distribution most where both happen. The probes for this use seeds that no test uses.

    Args:
        sampler: Draws the probes.
        plain: Computes the exact probabilities.
        prompts: Token ids of each prompt; the first `CANDIDATES` are considered.
        params: Sampling parameters of the first test.
        count: Number of prompts to choose.
        progress: Called as (prompts done, prompts in all).

    Returns:
        Numbers of `count` prompts, or of all if there are fewer.
    """
    cases = [SamplingCase(i, prompt, params) for i, prompt in enumerate(prompts[:CANDIDATES])]
    entropies: dict[int, float] = {}
    for case in cases:
        entropies[case.number] = Cells.of(plain.next_token(case.prompt, params), WIDTHS).entropy
        progress(len(entropies), len(cases))
    mixed: list[SamplingCase] = []  # drafts are often accepted and often rejected
    one_sided: list[SamplingCase] = []  # drafts are mostly accepted, or mostly rejected
    undrafted: list[SamplingCase] = []
    for case in sorted(cases, key=lambda case: -entropies[case.number]):
        if len(mixed) == count:
            break
        probes = Stats.merge(output.stats for outputs in sampler.draw(case, PROBES) for output in outputs)
        often = min(probes.accepted, probes.rejections) >= PROBES // 4
        (mixed if often else one_sided if probes.drafted else undrafted).append(case)
    return [case.number for case in [*mixed, *one_sided, *undrafted][:count]]
