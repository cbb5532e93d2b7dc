"""Interrupts (Ctrl-C) that are deferred to the end of a round, so that no state is left half-written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Context in which SIGINT is deferred, except in `deliver` and `wait`. Only the main thread receives it.

    Each signal is passed on once to the previous handler, which is restored at the end, whatever it raises. A
    signal that comes while the handlers are exchanged is passed on afterwards.
    """

    def __init__(self) -> None:
        self.deferring = True
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

    def wait(self, condition: threading.Condition) -> None:
        """Wait until the condition is notified; signals are passed on as they come."""
        try:
            self._stop_deferring()
            condition.wait()
        finally:
            self.deferring = True

    def _stop_deferring(self) -> None:
        while True:
            self.deliver()
            self.deferring = False
            if self.deferred is None:
                return
            self.deferring = True  # a signal came between the two statements

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.deferred = number, frame
        if not self.deferring:
            self.deferring = True  # until the previous handler returns; where it raises, to the end
            self._stop_deferring()
