"""Ctrl-C during generation: the first one ends the requests and keeps what they have, the next one quits."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft import LLM

__all__ = ["Interrupt"]


class Interrupt:
    """While entered, the first SIGINT cancels every request of `llm`; `came` says that it did.

    `llm` holds signals back until a round is over, so the engine is told between two rounds.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.came = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if it came: what follows must not begin."""
        if self.came:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self.came = True
        self.llm.cancel_all()
