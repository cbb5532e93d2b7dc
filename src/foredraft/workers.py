"""Workers: the threads that OpenMP starts for each thread that computes with PyTorch's operators.

They stay when it is done. Where more of them live than there are cores, OpenMP lets none of them spin between
two operations: each operation has to wake them from sleep. On two cores, decoding by PyTorch's operators took
1.65 times as long in every thread but the one that had loaded the model. So a thread ends its workers when it
is done; its next operation starts others.

And they spin for milliseconds after each operation, on the cores that the kernels' threads need: with 32 rows
on two cores, decoding by the kernels took 1.08 times as long. So operators beside kernels work alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["operators_alone", "own_threads", "release_workers"]

_hidden = threading.local()  # number: of threads, within `operators_alone`
SOFT = 1  # omp_pause_soft of OpenMP 5.0, section 3.2.44: settings stay


def release_workers() -> None:
    """End the workers that OpenMP keeps for this thread; without such a call in its library, do nothing.

    A thread that computes alone has none. In a forked process it may still have its parent's pool, whose end
    would wait for ever for threads that are not there.
    """
    pause = _openmp("omp_pause_resource_all")
    if pause is not None and torch.get_num_threads() > 1:
        pause(SOFT)


@contextmanager
def operators_alone(beside_kernels: bool) -> Iterator[None]:
    """Let PyTorch's operators in this thread work alone within the block; `own_threads` stays as it is.

    `torch.set_num_threads` would also set the number of threads that start meanwhile.

    Args:
        beside_kernels: Whether kernels do most of the block's work; otherwise the block changes nothing.
    """
    number, set_number = own_threads(), _openmp("omp_set_num_threads")
    if not beside_kernels or number == 1 or set_number is None or hasattr(_hidden, "number"):
        yield
        return
    _hidden.number = number
    set_number(1)
    try:
        yield
    finally:
        set_number(number)
        del _hidden.number


def own_threads() -> int:
    """Return how many threads this thread computes with: its `torch.get_num_threads()`."""
    return getattr(_hidden, "number", 0) or torch.get_num_threads()


@cache
def _openmp(name: str) -> Callable[[int], int] | None:
    """Return a function of the library of OpenMP that PyTorch has loaded."""
    try:
        found: Callable[[int], int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # no such call; on Windows there is no CDLL(None)
        return None
    return found
