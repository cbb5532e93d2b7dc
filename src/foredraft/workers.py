"""Workers: threads and processes beside the main one, and what a fork must not copy.

Locks that other threads held stay locked in a forked child, and OpenMP waits there for ever for the parent's
pool: so a child gets an error. Workers stay when a thread is done: where more live than there are cores,
OpenMP lets none spin between operations, and decoding by PyTorch's operators took 1.65 times as long on two
cores; so a thread ends its workers. And they spin on the cores that the kernels' threads need (1.08 times as
long with 32 rows), so operators beside kernels work alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from foredraft.errors import ConfigError, RequestError


class Loads:
    """Remembers the process whose threads loaded a model, because they do not survive a fork."""

    def __init__(self) -> None:
        self._process: int | None = None  # a forked child inherits its parent's

    def note(self, threads: int) -> None:
        """Note that this process loads a model."""
        if threads == 1:
            return
        if self._process is None:
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise ConfigError(
                f"process {self._process} loaded a model and then forked this one, in which its threads are "
                "missing",
                remedy="start this process by 'spawn', or fork it before the first model is loaded",
            )


def check_process(home: int) -> None:
    """Check that this process is the one that loaded a model."""
    if home != os.getpid():
        raise RequestError(
            f"process {home} loaded this model and then forked this one, in which its threads are missing",
            remedy="start this process by 'spawn' and load the model in it",
        )


_hidden = threading.local()  # number: of threads, within `operators_alone`
SOFT = 1  # omp_pause_soft of OpenMP 5.0, section 3.2.44: settings stay


def release_workers() -> None:
    """End the workers that OpenMP keeps for this thread; without such a call in its library, do nothing.

    A thread that computes alone may have its parent's pool, whose end would wait for ever for threads that
    are gone.
    """
    pause = _openmp("omp_pause_resource_all")
    if pause is not None and torch.get_num_threads() > 1:
        pause(SOFT)


@contextmanager
def operators_alone(by_kernels: bool) -> Iterator[None]:
    """Let PyTorch's operators in this thread work alone within the block; `own_threads` stays as it is."""
    number, set_number = own_threads(), _openmp("omp_set_num_threads")
    if not by_kernels or number == 1 or set_number is None or hasattr(_hidden, "number"):
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
