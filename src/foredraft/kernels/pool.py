"""What threads of the kernels' pool may still read when their call has returned (pool.inc).

A thread that the system took off its core within a piece of work may come back after the call: the others
have done its piece again meanwhile. It writes nothing then, but reads on in the tensors of the call for some
microseconds. So these tensors live until no such thread is left.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any

from foredraft.kernels.compilation import library

__all__ = ["LATE_THREADS", "keep", "settle"]

LATE_THREADS = 2  # a result of the kernels, as in kernels.c
MOST = 256  # calls whose tensors are kept, before one waits for the threads
NAP = 0.0005  # seconds between two looks

_kept: list[Any] = []
_lock = threading.Lock()


def keep(*used: Any) -> None:
    """Keep objects until no thread is late any more, at least.

    Args:
        *used: What a call was given that returned `LATE_THREADS`.
    """
    with _lock:
        if _settled() or (len(_kept) >= MOST and _wait()):
            _kept.clear()
        _kept.append(used)


def settle() -> None:
    """Wait until no thread is late any more, for milliseconds, and release what was kept."""
    with _lock:
        if _kept and _wait():
            _kept.clear()


atexit.register(settle)  # before the interpreter frees what a late thread reads


def _wait() -> bool:
    while not _settled():
        time.sleep(NAP)
    return True


def _settled() -> bool:
    kernels = library()
    assert kernels is not None, "a call of the kernels has returned"
    return bool(kernels.foredraft_settled())
