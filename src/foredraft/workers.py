"""Workers: the threads that OpenMP starts for each thread that computes with PyTorch's operators.

They stay when it is done. Where more of them live than there are cores, OpenMP lets none of them spin between
two operations: each operation has to wake them from sleep. On two cores, decoding by PyTorch's operators took
1.65 times as long in every thread but the one that had loaded the model. So a thread ends its workers when it
is done; its next operation starts others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

__all__ = ["release_workers"]

SOFT = 1  # omp_pause_soft of OpenMP 5.0, section 3.2.44: settings stay


def release_workers() -> None:
    """End the workers that OpenMP keeps for this thread; without such a call in its library, do nothing.

    A thread that computes alone has none. In a forked process it may still have its parent's pool, whose end
    would wait for ever for threads that are not there.
    """
    pause = _pause()
    if pause is not None and torch.get_num_threads() > 1:
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """Return `omp_pause_resource_all` of the library that PyTorch has loaded."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # no such call; on Windows there is no CDLL(None)
        return None
