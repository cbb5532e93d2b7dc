"""Spreads of measurements and the timers of `foredraft bench`, shared by the scripts of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft.bench.records import Spread
from foredraft.profiling.timing import interleaved, timed

__all__ = ["interleaved", "spread", "timed"]


def spread(figures: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles as plain values for JSON."""
    found = Spread.of(figures)
    assert found is not None
    return asdict(found)
