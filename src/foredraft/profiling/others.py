"""Others: the CPU time that other programs take while something is timed, and turns that are repeated for it.

The counters of /proc/stat (https://docs.kernel.org/filesystems/proc.html) say how long the CPUs of this
process were busy. What it and its children did not use, other programs took, or the hypervisor (steal).
Without such counters nothing is repeated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DISTURBED = 0.25  # CPUs that others use from which on a timed turn is repeated
RESOLUTION = 1.5  # ticks by which the difference of two readings may be off, for each CPU
ATTEMPTS = 3  # of a turn at most: what disturbs three in a row is no passing disturbance
ROOT = Path("/")
BUSY = (0, 1, 2, 5, 6, 7)  # fields of /proc/stat, in ticks: user, nice, system, (idle, iowait), irq, ...
CHILDREN_TIME = slice(11, 15)  # of /proc/PID/stat after the name: its own, and of its children


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters in seconds, of which only differences mean something."""

    clock: float  # of the wall
    busy: float  # CPU time of all programs on the CPUs that this process may use
    own: float  # CPU time of this process and of the processes that it started
    unsure: float = 0.0  # by how much a difference of `busy` may be off, because it advances in ticks


@dataclass(frozen=True, slots=True)
class Load:
    """What other programs took in an interval."""

    seconds: float  # length of the interval
    others: float  # CPUs that they used, on average: CPU seconds per second
    unsure: float = 0.0  # CPU seconds by which that may be off

    @property
    def disturbed(self) -> bool:
        """Whether they took more than DISTURBED, by more than the counters may be off."""
        return (self.others - DISTURBED) * self.seconds > self.unsure


def read_counters(root: Path | None = None) -> Counters | None:
    """Return the counters now; None where the system has none."""
    root = ROOT if root is None else root
    try:
        tick = 1 / os.sysconf("SC_CLK_TCK")
        allowed = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        lines = (line.split() for line in (root / "proc/stat").read_text().splitlines())
        counted = [list(map(int, numbers)) for name, *numbers in lines if name in allowed]
        if not counted:
            return None
        by_cpu = [sum(numbers[field] for field in BUSY) for numbers in counted]  # ticks
        times = os.times()
        own = time.process_time() + times.children_user + times.children_system
        own += tick * sum(_children_ticks(root))
        return Counters(time.perf_counter(), tick * sum(by_cpu), own, unsure=tick * RESOLUTION * len(by_cpu))
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def _children_ticks(root: Path, process: str = "self") -> Iterator[int]:
    """Yield the ticks of every process that a process started and has not waited for, by generations."""
    for listed in (root / "proc" / process / "task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):  # a thread or a process that has just ended
            for child in listed.read_text().split():
                fields = (root / "proc" / child / "stat").read_text().rpartition(")")[2].split()
                yield sum(map(int, fields[CHILDREN_TIME]))
                yield from _children_ticks(root, child)


class Watch:
    """Watches other programs from when it is made."""

    def __init__(self, read: Callable[[], Counters | None] | None = None) -> None:
        self._read = read or read_counters
        self._began = self._read()

    def load(self) -> Load | None:
        """Return what other programs have taken since; None where it is not known."""
        now = self._read()
        if self._began is None or now is None or now.clock <= self._began.clock:
            return None
        seconds = now.clock - self._began.clock
        others = (now.busy - self._began.busy) - (now.own - self._began.own)
        return Load(seconds, max(0.0, others) / seconds, now.unsure)


def worst(loads: Iterable[Load | None]) -> Load | None:
    """Return the load that disturbed most; None where none is known."""
    known = [load for load in loads if load is not None]
    return max(known, key=lambda load: (load.disturbed, load.others), default=None)


class QuietTurns:
    """Takes turns, and repeats those that other programs disturbed."""

    def __init__(self, turns: int) -> None:
        self._left = turns
        self.kept = self.repeated = self.disturbed = 0  # turns whose result was kept

    def take(self, turn: Callable[[], tuple[T, Load | None]]) -> tuple[T, list[T]]:
        """Take a turn until it is not disturbed, ATTEMPTS times at most."""
        attempts = [turn()]
        while (load := attempts[-1][1]) and load.disturbed and self._left and len(attempts) < ATTEMPTS:
            self._left -= 1
            self.repeated += 1
            attempts.append(turn())
        self.kept += 1
        others = [0.0 if load is None else load.others for _, load in attempts]
        result, load = attempts.pop(others.index(min(others)))
        self.disturbed += load is not None and load.disturbed
        return result, [other for other, _ in attempts]
