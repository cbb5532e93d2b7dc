"""Measurements in turns and their spreads, each beside what other programs took meanwhile.

A turn that they disturbed is taken again, and the spread says how many were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from foredraft.bench.bench_records import Spread
from foredraft.profiling.others import Load, QuietTurns, Watch
from foredraft.profiling.timing import TimedTurns, Work

T = TypeVar("T")

# Seconds between two calls of `spread` from which on something was measured between them: the figures of one
# measurement are made within milliseconds.
APART = 0.1


class Surroundings:
    """What happens beside the measurements of this script, from one that has its figures to the next."""

    def __init__(self) -> None:
        self._watch, self._made, self._shown = Watch(), 0.0, dict[str, Any]()
        self.repeated = 0  # turns, since the last figures

    def shown(self) -> dict[str, Any]:
        """Return what stands beside figures that are made now."""
        now = time.perf_counter()
        if not self._shown or now - self._made > APART:
            load = self._watch.load()
            self._shown = {"others": load and round(load.others, 3), "repeated": self.repeated}
            self._watch, self.repeated = Watch(), 0
        self._made = now
        return self._shown


_surroundings = Surroundings()


class Quiet:
    """Takes the turns of a script's own loop, and repeats those that others disturbed, `turns` at most."""

    def __init__(self, turns: int) -> None:
        self._turns = QuietTurns(turns)

    def take(self, turn: Callable[[], T]) -> T:
        """Return what a turn returned when it was disturbed least."""

        def watched() -> tuple[T, Load | None]:
            watch = Watch()
            return turn(), watch.load()

        before = self._turns.repeated
        result, _ = self._turns.take(watched)
        _surroundings.repeated += self._turns.repeated - before
        return result


def interleaved(
    works: Mapping[Any, Work],
    device: torch.device,
    repeats: int,
    *,
    warm: int = 4,
    settle: float | None = None,
) -> dict[Hashable, list[float]]:
    """Return the seconds of each work, as `profiling.timing.interleaved`; disturbed turns are repeated."""
    turns, quiet = TimedTurns(works, device, settle), Quiet(repeats)
    for _ in range(warm):
        turns.take(counts=False)
    seconds: dict[Hashable, list[float]] = {key: [] for key in works}

    def turn() -> dict[Hashable, float]:
        turns.take()
        return {key: taken.pop() for key, taken in turns.seconds.items()}

    for _ in range(repeats):
        for key, figure in quiet.take(turn).items():
            seconds[key].append(figure)
    return seconds


def spread(figures: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles as plain values for JSON, and what happened beside them.

    `others` are the CPUs that other programs used since the figures of the measurement before, or since the
    script began; None where that is not known. `repeated` are the turns that were taken again.
    """
    found = Spread.of(figures)
    assert found is not None
    return asdict(found) | _surroundings.shown()
