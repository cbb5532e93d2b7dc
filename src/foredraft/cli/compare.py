"""Time plain against speculative decoding, in alternating runs.

`alternate` runs both once to warm up, then in pairs whose order flips every time, so that a machine that
slows down or speeds up affects both alike. The speed-up is the median of the ratios within the pairs. It
always comes with the exactness flag of the same runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Comparison", "Generate", "alternate"]

ALTERNATIONS = 5  # pairs of timed runs: an odd number, so that the median is one of the ratios
Tokens = Sequence[Sequence[int]]  # the new tokens of every output
Generate = Callable[[], Tokens]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `alternate`.

    Attributes:
        speedups: Speculative over plain tokens/s, one ratio per pair.
        plain_tokens_per_second: Median over the pairs.
        speculative_tokens_per_second: Median over the pairs.
        identical: All runs gave the same tokens; None if they need not.
    """

    speedups: tuple[float, ...]
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    identical: bool | None

    @property
    def speedup(self) -> float:
        return median(self.speedups)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "speedup": self.speedup,
            "speedup_low": min(self.speedups),
            "speedup_high": max(self.speedups),
            "alternations": len(self.speedups),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "identical": self.identical,
        }


def alternate(
    plain: Generate,
    speculative: Generate,
    *,
    comparable: bool,
    earlier: Tokens | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Time plain and speculative decoding in alternating runs.

    Args:
        plain: Generates the tokens by plain decoding.
        speculative: Generates them with the drafter.
        comparable: The tokens of all runs must be the same.
        earlier: Tokens of an earlier run, included in the comparison of tokens.
        clock: Returns seconds.
        progress: Called as (runs done, runs in all).
    """
    total = 2 * (ALTERNATIONS + 1)
    done = 0
    texts: list[Tokens] = [] if earlier is None else [earlier]

    def rate(generate: Generate) -> float:
        nonlocal done
        start = clock()
        tokens = generate()
        seconds = clock() - start
        texts.append(tokens)
        done += 1
        progress(done, total)
        return sum(len(output) for output in tokens) / seconds

    rate(plain), rate(speculative)
    rates: list[tuple[float, float]] = []
    for index in range(ALTERNATIONS):
        if index % 2:
            fast = rate(speculative)
            rates.append((rate(plain), fast))
        else:
            slow = rate(plain)
            rates.append((slow, rate(speculative)))
    same = all([list(output) for output in text] == [list(output) for output in texts[0]] for text in texts)
    return Comparison(
        speedups=tuple(fast / slow for slow, fast in rates),
        plain_tokens_per_second=median(slow for slow, _ in rates),
        speculative_tokens_per_second=median(fast for _, fast in rates),
        identical=same if comparable else None,
    )
