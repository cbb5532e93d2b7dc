"""Progress of a command on stderr: bars on a terminal, lines elsewhere.

A command that measures for minutes shows its first stage before it imports PyTorch, and so at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["STAGES", "ProgressBars", "ProgressLines", "started"]

TRIAL_LINES = 10  # lines that `ProgressLines` prints during the trials, one after each tenth
START = "start"
# Name of a stage -> its description. A stage that is not listed is its own description.
STAGES = {
    START: "Importing PyTorch",
    "kernels": "Compiling kernels, once for this machine",
    "profile": "Measuring the costs of this machine",
    "methods": "Loading the methods",
    "bandwidth": "Measuring the memory bandwidth",
    "download": "Downloading (MB)",
    "load": "Loading the models",
    "prefill": "Reading the prompt",
    "compare": "Comparing",
    "calibrate": "Generating calibration texts (tokens)",
    "read": "Reading calibration texts (tokens)",
    "costs": "Timing passes (turns)",
    "rank": "Ranking seed plans (sub-layers run)",
    "trials": "Trials",
    "decode": "Decoding held-out prompts",
    "self-generate": "Continuing the prompts of the data",
    "train": "Training",
    "validate": "Validated",
    "examine": "Trying settings",
}


def started() -> ProgressBars | ProgressLines:
    """Return the progress of a command that measures, with its first stage shown."""
    shown = ProgressBars() if sys.stderr.isatty() else ProgressLines()
    shown.show(START, 0, 1)
    return shown


class ProgressBars:
    """One bar per stage on stderr, removed when the stage is done; nothing if stderr is not a terminal.

    Bars are drawn only within `show`, without a refresh thread, so that they take no time from a timed run.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._only: str | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Draw a stage's bar.

        Args:
            stage: A key of `STAGES`, or a description.
            done: Steps done.
            total: Steps of the stage; the bar is removed when all are done.
            note: Printed beside the description.
        """
        if not sys.stderr.isatty() or self._only not in (None, stage):
            return
        if START in self._tasks and stage != START:
            self.clear()  # importing has no end of its own
        if self._bars is None:
            self._bars = self._start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(STAGES.get(stage, stage))
        description = ", ".join(filter(None, (STAGES.get(stage, stage), note)))
        self._bars.update(self._tasks[stage], completed=done, total=total, description=description)
        self._bars.refresh()
        if done >= total:
            self.clear()

    @contextmanager
    def only(self, stage: str) -> Iterator[None]:
        """Hide all other stages within the context."""
        self._only = stage
        try:
            yield
        finally:
            self._only = None

    def clear(self) -> None:
        """Remove the bars, so that text can follow."""
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
    """One line per stage, and one per tenth of the trials, for a stderr that is not a terminal."""

    def __init__(self) -> None:
        self._printed: tuple[str, int] | None = None

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Print a line if the stage, or a tenth of the trials, is new. Takes the arguments of
        `ProgressBars.show`."""
        tenth = TRIAL_LINES * done // max(1, total) if stage == "trials" else 0
        if (stage, tenth) == self._printed:
            return
        self._printed = stage, tenth
        parts = [STAGES.get(stage, stage) + (f" {done}/{total}" if stage == "trials" else ""), note]
        print(f"foredraft: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Do nothing: printed lines stay."""
