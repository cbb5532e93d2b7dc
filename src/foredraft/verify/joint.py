"""Chi-square tests of the sampled joint law against the target's own.

Siblings of one prompt share its prefill, and say `len(WIDTHS)` tokens each. The draft may be as long as that
allows, so accepted tokens, corrections and the bonus token after a whole draft all fall into the positions
that are tested. Expected probabilities come of plain forwards of the target: nothing is estimated.
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
from foredraft.verify.plain import PlainTarget
from foredraft.verify.report import LawTest

__all__ = ["POWER", "SIBLINGS", "WIDTHS", "Distribution", "Sampler", "choose_prompts", "run_test"]

# Tokens told apart at each position. Every cell more costs samples: 3 positions make 7 cells here, and 1 + 3
# * (1 + 3 * 4) = 40 with three tokens each, which would take 1.7 times the samples for the same distance.
WIDTHS = (2, 1, 1)
POWER = 0.9
SIBLINGS = 512  # in one call: the next one goes on with another seed, and progress is told in between
CANDIDATES = 40  # prompts looked at for the tests
PROBES = 16  # samples by which a prompt is known to have drafts kept and refused


@dataclass(frozen=True, slots=True)
class Distribution:
    """What one test is about: a prompt by its number, and how it is sampled."""

    number: int
    prompt: list[int]
    params: SamplingParams


class Sampler:
    """Continuations of len(WIDTHS) tokens, no two calls with the same noise."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._seeds: Iterator[int] = itertools.count(seed)

    def draw(self, law: Distribution, count: int) -> Iterator[list[Output]]:
        """`count` samples, some at a time."""
        while count > 0:
            size = min(count, SIBLINGS)
            params = replace(law.params, max_new_tokens=len(WIDTHS), seed=next(self._seeds), ignore_eos=True)
            yield self.llm.generate([law.prompt], params, n=size)
            count -= size


def run_test(
    sampler: Sampler,
    plain: PlainTarget,
    law: Distribution,
    *,
    level: float,
    samples: Callable[[int], int],
    progress: Callable[[int, int], None],
) -> LawTest:
    """samples: how many there shall be for so many cells."""
    cells = Cells.of(plain.chances(law.prompt, law.params), WIDTHS)
    size = samples(len(cells.chances))
    counts, impossible, errors = [0] * len(cells.chances), 0, []
    stats: list[Stats] = []
    progress(0, size)
    for outputs in sampler.draw(law, size):
        for output in outputs:
            stats.append(output.stats)
            if output.error:
                errors.append(output.error)
            elif (cell := cells.of_sample(output.token_ids)) is None:
                impossible += 1
            else:
                counts[cell] += 1
        progress(len(stats), size)
    outcome = chi_square.pearson(counts, cells.chances, size)
    if len(cells.chances) == 1:
        least = chi_square.surely_seen(size, POWER)
    else:
        least = chi_square.detectable(size, outcome.cells - 1, level, POWER)
    total = Stats.merge(stats)
    return LawTest(
        prompt=law.number,
        drafter=law.params.drafter or "none",
        acceptance=law.params.acceptance or "speculative",
        temperature=law.params.temperature,
        top_k=law.params.top_k,
        top_p=law.params.top_p,
        samples=size,
        positions=len(WIDTHS),
        cells=outcome.cells,
        statistic=outcome.statistic,
        p_value=0.0 if impossible else outcome.p_value,
        level=level,
        detectable=least,
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
    """Numbers of `count` prompts on which a defect would show; fewer if there are fewer.

    First those whose continuations spread most evenly over the cells: a law that is nearly certain has
    nothing to bend. Of these, those where drafts are often kept and often refused, by a few samples that no
    test sees again: a wrong correction bends the law most where both happen.
    """
    laws = [Distribution(i, prompt, params) for i, prompt in enumerate(prompts[:CANDIDATES])]
    entropies: dict[int, float] = {}
    for law in laws:
        entropies[law.number] = Cells.of(plain.chances(law.prompt, params), WIDTHS).entropy
        progress(len(entropies), len(laws))
    ranked = sorted(laws, key=lambda law: -entropies[law.number])
    good: list[Distribution] = []
    fair: list[Distribution] = []
    poor: list[Distribution] = []
    for law in ranked:
        if len(good) == count:
            break
        drawn = Stats.merge(output.stats for outputs in sampler.draw(law, PROBES) for output in outputs)
        often = min(drawn.accepted, drawn.rejections) >= PROBES // 4
        (good if often else fair if drawn.drafted else poor).append(law)
    return [law.number for law in [*good, *fair, *poor][:count]]
