"""Clocks that wait for the device, and what several measurements come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """Median and quartiles, which lie within the data."""
    several = list(figures) if len(figures) > 1 else list(figures) * 2
    low, middle, high = quantiles(several, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "runs": len(figures)}


def copy_bandwidth(device: torch.device, size: int, repeats: int = 20) -> dict[str, Any]:
    """Bytes read plus bytes written per second, `size` of them in a copy on the device, of the best copy."""
    source = torch.randint(-128, 128, (size // 2,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source), device)[0] for _ in range(repeats))
    moved = 2 * source.numel()
    return {"bytes_per_second": moved / best, "bytes_moved": moved, "best_of": repeats}
