"""Ctrl-C: the first one ends what runs at a place where nothing is lost, the second one quits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft import LLM

__all__ = ["Interrupt", "deferred"]


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt once a SIGINT arrived; a second one raises it at once.

    Raised anywhere, a KeyboardInterrupt gets lost in a finaliser, or PyTorch takes it for a file that cannot
    be written.
    """
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        check()
        received = True

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


class Interrupt:
    """Context manager that handles SIGINT: the first signal cancels all requests of `llm`.

    `llm` defers signals to the end of a round, so the engine is never interrupted within one.

    Attributes:
        received: A SIGINT arrived.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT arrived, so that the next step does not start."""
        if self.received:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.received = True
        self.llm.cancel_all()
