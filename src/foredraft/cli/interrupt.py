"""Ctrl-C: the first one ends what runs at a place where nothing is lost, the second one quits."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft import LLM

__all__ = ["Interrupt"]


class Interrupt:
    """Context manager that handles SIGINT: the first signal cancels all requests of `llm`.

    `llm` defers signals to the end of a round, so the engine is never interrupted within one. Other work
    calls `check` where nothing is lost: raised anywhere, a KeyboardInterrupt is forgotten in a finaliser, or
    PyTorch takes it for a file that cannot be written.

    Attributes:
        received: A SIGINT arrived.
    """

    def __init__(self, llm: LLM | None = None) -> None:
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
        if self.llm is not None:
            self.llm.cancel_all()
