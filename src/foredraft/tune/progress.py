"""Progress of a search: the callback's protocol, and a counter for the steps of a stage."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Steps", "silent"]


class Progress(Protocol):
    """A callback for progress: the stage's name, steps done, steps in total, and a note to show beside it."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    """Ignore the progress."""


class Steps:
    """Count the steps of one stage and report each; the stage starts when the counter is made."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.done = 0
        progress(stage, 0, total)

    def __call__(self, count: int = 1) -> None:
        self.done += count
        self.progress(self.stage, self.done, self.total)
