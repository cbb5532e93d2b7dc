"""Timing: work that takes turns on the clock, so that a disturbance burdens every side alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch

from foredraft.model.runner.graphs import Graphs
from foredraft.model.transfers import synchronise

__all__ = ["OwnSeconds", "Turns", "Work", "interleaved", "replaced", "timed"]

# Runs of a work for one time that counts, at most: a pass whose shape is new is captured when it runs again,
# and replayed from then on. One more for a work whose second run has new shapes.
RUNS = 4

T = TypeVar("T")

Work: TypeAlias = Callable[[], object]


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the seconds until the device has finished, and the result."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


class OwnSeconds(float):
    """The seconds of a work that has more to do than what is timed, as its result."""


class Turns:
    """Works that take turns: each once, and the next turn in the opposite order.

    Args:
        works: By key.
        device: Where they run.
        settle: Seconds for which a work runs before it is timed, once at least, so that it finds the CPU's
            caches as it leaves them itself and not as another work did. None times it at once.

    Attributes:
        seconds: Of each work, by key, one figure a turn.
    """

    def __init__(self, works: Mapping[Any, Work], device: torch.device, settle: float | None = None) -> None:
        self.works, self.device, self.settle = works, device, settle
        self.seconds: dict[Any, list[float]] = {key: [] for key in works}
        self._backwards = False

    def keep(self, keys: Collection[Any]) -> None:
        """Leave out the other works."""
        self.works = {key: work for key, work in self.works.items() if key in keys}
        self.seconds = {key: self.seconds[key] for key in self.works}

    def take(self, *, counts: bool = True, until: float = math.inf) -> None:
        """Time every work once; counts=False only warms up.

        No work begins after `until`, in seconds of `time.perf_counter`.
        """
        for key in list(self.works)[:: -1 if self._backwards else 1]:
            if time.perf_counter() > until:
                return
            if self.settle is not None:
                ran = timed(self.works[key], self.device)[0]
                while ran < self.settle:
                    ran += timed(self.works[key], self.device)[0]
            taken, result = self._steadily_timed(self.works[key])
            if counts:
                self.seconds[key].append(result if isinstance(result, OwnSeconds) else taken)
        self._backwards = not self._backwards

    def _steadily_timed(self, work: Work) -> tuple[float, object]:
        """Time a work; again where a pass of it was captured, or will be when it runs again."""
        for _ in range(RUNS):
            before = Graphs.unsettled
            found = timed(work, self.device)
            if Graphs.unsettled == before:
                break
        return found


def interleaved(
    works: Mapping[Any, Work],
    device: torch.device,
    repeats: int,
    *,
    warm: int = 4,
    settle: float | None = None,
    after: Work = lambda: None,
) -> dict[Hashable, list[float]]:
    """Return the seconds of each work, by key, in `repeats` turns after `warm` uncounted ones.

    settle: As `Turns` has it. after: Called after every turn.
    """
    turns = Turns(works, device, settle)
    for turn in range(-warm, repeats):
        turns.take(counts=turn >= 0)
        after()
    return turns.seconds


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one object inside the block."""
    before = vars(thing).get(name)  # None where only the class has it
    setattr(thing, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(thing, name)
        else:
            setattr(thing, name, before)
