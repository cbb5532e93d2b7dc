"""Observer: hears of an engine's phases while it runs, for programs that time them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, TypeAlias

from foredraft.decode.sequence import Sequence

__all__ = ["SILENT", "Observer", "Phase"]

# A step is one call of `Engine.step`; the other phases lie within it.
Phase: TypeAlias = Literal["step", "prefill", "round", "draft", "verify"]

_NOTHING: Final = nullcontext()


class Observer:
    """Base class of observers; it observes nothing.

    The engine enters the returned context at the beginning of a phase and leaves it at the end.
    """

    def phase(self, phase: Phase) -> AbstractContextManager[object]:
        """Return the context of one phase."""
        return _NOTHING

    def drafter_reads(self, sequence: Sequence, start: int, stop: int) -> AbstractContextManager[object]:
        """Return the context in which a drafter reads tokens [start, stop) that it missed, within "draft"."""
        return _NOTHING


SILENT: Final = Observer()
