"""Hyperthreads: whether a thread for every logical CPU is faster than one for every physical core.

It depends on the machine: two threads of a core share its arithmetic units and caches, but where memory or
waiting is the limit, the second one uses what the first leaves. So it is measured, once, and kept by the
machine and by what the process may use of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from foredraft import user_cache
from foredraft.profiling.forwards import SETTLE
from foredraft.profiling.others import Watch
from foredraft.profiling.timing import Turns, timed

__all__ = ["faster_threads", "known_faster"]

CPU = torch.device("cpu")
KIND = "threads"  # of the user's cache
TURNS = 7  # timed steps of each number, of which the least counts
SECONDS = 0.5  # after which no step begins: a load waits for it
STEPS = 10  # that fit into SECONDS at least where any are compared: each number settles before it is timed
GAIN = 1.05  # of logical CPUs over physical cores from which on it is no noise


def known_faster(physical: int, logical: int, machine: Any) -> int | None:
    """Return the faster number if it is known: both are equal, or it was measured on this machine before."""
    if physical == logical:
        return physical
    kept = user_cache.read(KIND, _key(physical, logical, machine))
    return kept if kept in (physical, logical) else None


def faster_threads(physical: int, logical: int, machine: Any, step: Callable[[int], object]) -> int:
    """Return which number of threads runs a step faster, by what is known or else by measuring.

    Args:
        physical: Threads for the physical cores.
        logical: Threads for all logical CPUs.
        machine: What the answer depends on, as JSON: the CPU, and which part of it the process may use.
        step: Computes what a token takes with a number of threads.

    Returns:
        The physical cores, unless the logical CPUs are faster by GAIN or more. Where a step takes too long
        to compare several within SECONDS, or other programs disturbed them, it is the cores, and nothing is
        kept.
    """
    known = known_faster(physical, logical, machine)
    if known is not None:
        return known
    until = time.perf_counter() + SECONDS
    on_cores = partial(step, physical)
    if (
        timed(on_cores, CPU)[0] > SECONDS or timed(on_cores, CPU)[0] > SECONDS / STEPS
    ):  # the first one warms up
        return physical
    watch = Watch()
    turns = Turns({n: partial(step, n) for n in (physical, logical)}, CPU, SETTLE)
    for _ in range(TURNS):
        turns.take(until=until)
    load = watch.load()
    if not all(turns.seconds.values()) or (load is not None and load.disturbed):
        return physical
    fewer, more = (min(turns.seconds[n]) for n in (physical, logical))
    faster = logical if fewer >= GAIN * more else physical
    user_cache.write(KIND, _key(physical, logical, machine), faster)
    return faster


def _key(physical: int, logical: int, machine: Any) -> dict[str, Any]:
    return {"machine": machine, "candidates": [physical, logical], "torch": torch.__version__}
