"""Plain against speculative decoding, timed side by side.

Contract: `alternate` runs both once to warm up, then in pairs whose order flips every time, so that a
machine that slows down or speeds up burdens both alike. The speed-up is the median of the ratios within
the pairs, and never comes without the exactness flag of the same runs. Pure but for the runs and the
clock that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Comparison", "Generate", "alternate"]

Tokens = Sequence[Sequence[int]]  # the generated tokens of every output
Generate = Callable[[], Tokens]


@dataclass(frozen=True, slots=True)
class Comparison:
    """speedups: speculative over plain tokens/s, a pair each. identical: None = not comparable."""

    speedups: tuple[float, ...]
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    identical: bool | None

    @property
    def speedup(self) -> float:
        return median(self.speedups)

    def as_dict(self) -> dict[str, Any]:
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
    shown: Tokens | None = None,
    alternations: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Time both; `comparable` says whether their tokens must be the same ones, and those `shown` before."""
    total = 2 * (alternations + 1)
    done = 0
    texts: list[Tokens] = [] if shown is None else [shown]

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
    for index in range(alternations):
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
