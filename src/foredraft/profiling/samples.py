"""Samples: the least times of every cost, gathered until two of them agree.

On a shared machine samples are too long, never too short. So the least one is the cost, and it is believed
where the second least agrees with it. Samples are kept between processes: each measures what is not steady.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Samples", "agreed"]

AGREEMENT = 1.1  # ratio of the two least samples up to which they agree


def agreed(samples: Sequence[float]) -> float | None:
    """Return the least sample, or None unless the second least agrees with it."""
    least = sorted(samples)[:2]
    return least[0] if len(least) == 2 and least[1] <= AGREEMENT * least[0] else None


class Samples:
    """The two least samples of each cost, in ms."""

    def __init__(self, least: Mapping[str, Iterable[float]] | None = None) -> None:
        self.least = {cost: sorted(samples)[:2] for cost, samples in (least or {}).items()}

    def add(self, cost: str, samples: Iterable[float]) -> None:
        self.least[cost] = sorted([*self.least.get(cost, []), *samples])[:2]

    def ms(self, cost: str) -> float | None:
        """Return the least sample of a cost; None where there is none."""
        samples = self.least.get(cost)
        return samples[0] if samples else None

    def steady(self, cost: str) -> float | None:
        """Return the least sample of a cost if two agree, else None."""
        return agreed(self.least.get(cost, []))

    @classmethod
    def from_json(cls, values: Any) -> Samples:
        """Return the samples whose `least` was kept; what is none is left out, to be measured again."""
        kept = values.items() if isinstance(values, dict) else ()
        return cls({cost: samples for cost, samples in kept if _are_times(samples)})


def _are_times(samples: Any) -> bool:
    return isinstance(samples, list) and all(
        isinstance(ms, int | float) and 0 <= ms <= sys.float_info.max for ms in samples
    )
