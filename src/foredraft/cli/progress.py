"""How far a command is, on stderr: bars that go away, or lines that stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["STAGES", "ProgressBars", "ProgressLines"]

PARTS = 10  # of the trials, after each of which a line is printed
STAGES = {
    "download": "Downloading (MB)",
    "load": "Loading",
    "prefill": "Reading the prompt",
    "compare": "Comparing",
    "calibrate": "Texts to try plans on (tokens)",
    "read": "Reading these texts (tokens)",
    "costs": "Timing passes (turns)",
    "rank": "Plans to begin with (sub-layers run)",
    "trials": "Trials",
    "decode": "Decoding held-out prompts",
}


class ProgressBars:
    """A bar a stage on stderr, gone when it is done; none where stderr is not a terminal.

    They are drawn when they are told something and never in between, so no thread takes time from a
    timed run.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._alone: str | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """note: stands beside the stage's name."""
        if not sys.stderr.isatty() or self._alone not in (None, stage):
            return
        if self._bars is None:
            self._bars = self._start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(STAGES.get(stage, stage))
        described = ", ".join(filter(None, (STAGES.get(stage, stage), note)))
        self._bars.update(self._tasks[stage], completed=done, total=total, description=described)
        self._bars.refresh()
        if done >= total:
            self.clear()

    @contextmanager
    def alone(self, stage: str) -> Iterator[None]:
        """Keep the other stages off the screen."""
        self._alone = stage
        try:
            yield
        finally:
            self._alone = None

    def clear(self) -> None:
        """Take them off the screen; text may follow."""
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        bars.start()
        return bars


class ProgressLines:
    """Where stderr is no terminal: a line where a stage begins, and at every tenth of the trials."""

    def __init__(self) -> None:
        self._told: tuple[str, int] | None = None

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        tenth = PARTS * done // max(1, total) if stage == "trials" else 0
        if (stage, tenth) == self._told:
            return
        self._told = stage, tenth
        told = [STAGES.get(stage, stage) + (f" {done}/{total}" if stage == "trials" else ""), note]
        print(f"foredraft: {', '.join(filter(None, told))}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Lines stay."""
