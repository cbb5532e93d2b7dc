"""Interrupts (Ctrl-C) that are deferred while state changes, so that no change is left half-made."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Context in which SIGINT is deferred, except in `deliver`. Only the main thread receives it.

    Each signal is passed on once to the previous handler, which is restored at the end, whatever it raises. A
    signal that comes while the handlers are exchanged is passed on afterwards.

    Args:
        wake: Called when a signal was deferred, at any instruction: ends a wait, so that the signal can be
            delivered.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self.wake, self.process = wake, os.getpid()
        self.deferred: tuple[int, FrameType | None] | None = None
        self.previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self.previous = previous
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
        self.deliver()

    def deliver(self) -> None:
        """Pass a deferred signal on."""
        while self.deferred is not None and self.previous is not None:
            deferred, self.deferred = self.deferred, None
            self.previous(*deferred)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.process != os.getpid() and self.previous is not None:
            self.previous(number, frame)  # another thread forked this process; the call goes on in its parent
            return
        self.deferred = number, frame
        if self.wake is not None:
            self.wake()
