"""Interrupts (Ctrl-C) that wait for the end of a round, so that no state is left half-written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """SIGINT waits within, but for `deliver` and `wait`; only the main thread ever gets one.

    Each one that comes is handed on, once, to the handler that was there before, and that is back whatever it
    raises: what comes while the two change places is handed on afterwards.
    """

    def __init__(self) -> None:
        self.holding = True
        self.noted: tuple[int, FrameType | None] | None = None
        self.previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self.previous = previous
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
        self.deliver()

    def deliver(self) -> None:
        """Hand on what was held back."""
        while self.noted is not None and self.previous is not None:
            noted, self.noted = self.noted, None
            self.previous(*noted)

    def wait(self, condition: threading.Condition) -> None:
        """Until it is notified; interrupts are handed on as they come."""
        try:
            self._let_in()
            condition.wait()
        finally:
            self.holding = True

    def _let_in(self) -> None:
        while True:
            self.deliver()
            self.holding = False
            if self.noted is None:
                return
            self.holding = True  # it came between the two

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = number, frame
        if not self.holding:
            self.holding = True  # until the handler has returned; if it raises, to the end
            self._let_in()
