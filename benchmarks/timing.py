"""What several measurements come to, and the clocks of `foredraft bench`, for the scripts here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft.bench.records import Spread
from foredraft.bench.timing import interleaved, timed

__all__ = ["interleaved", "spread", "timed"]


def spread(figures: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, for JSON."""
    found = Spread.of(figures)
    assert found is not None
    return asdict(found)
