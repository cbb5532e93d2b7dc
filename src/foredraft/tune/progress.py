"""How far a search is: who is told, and the steps of a stage that knows their number beforehand."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Steps", "silent"]


class Progress(Protocol):
    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    """Nobody is told."""


class Steps:
    """Called for each step that was taken, or for several; tells that the stage began when it is made."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.done = 0
        progress(stage, 0, total)

    def __call__(self, count: int = 1) -> None:
        self.done += count
        self.progress(self.stage, self.done, self.total)
