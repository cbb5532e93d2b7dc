"""Clocks that wait for the device, and what several measurements come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from foredraft.bench.records import Spread
from foredraft.bench.timing import synchronise

__all__ = ["interleaved", "spread", "timed"]

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds until the device is done, and what came of it."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


def interleaved(
    works: Mapping[Any, Callable[[], object]], device: torch.device, repeats: int, warm: int = 4
) -> dict[Any, list[float]]:
    """Seconds of each, by its key: all of them once, then again in the opposite order, `repeats` times."""
    seconds: dict[Any, list[float]] = {name: [] for name in works}
    for turn in range(-warm, repeats):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            taken, _ = timed(works[name], device)
            if turn >= 0:
                seconds[name].append(taken)
    return seconds


def spread(figures: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, for JSON."""
    found = Spread.of(figures)
    assert found is not None
    return asdict(found)
