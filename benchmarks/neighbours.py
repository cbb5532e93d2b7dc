"""Processes that use the machine beside what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy"]


@contextmanager
def busy(processes: int, *, core: int | None = None) -> Iterator[None]:
    """Run so many processes beside that never wait; on one core alone, if it is given."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        if core is not None:
            for process in running:
                os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
