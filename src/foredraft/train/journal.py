"""Journal: one JSON object a step in `metrics.jsonl`, and the figures for TensorBoard where it is installed.

The file is the record; TensorBoard shows it. A run that is continued drops what came after its checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.files import replacing

__all__ = ["Journal"]

FILE, FOLDER = "metrics.jsonl", "tensorboard"


class Journal:
    """The figures of a run.

    Args:
        folder: Holds them.
        step: The last step that counts; entries of later ones are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.file = folder / FILE
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        with replacing(self.file) as new:
            new.write_text("".join(f"{line}\n" for line in kept))
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)

    def _lines(self) -> list[str]:
        """Return the whole lines of the file: the last one may be cut."""
        if not self.file.is_file():
            return []
        return self.file.read_text().split("\n")[:-1]

    def write(self, step: int, figures: dict[str, float | list[float]]) -> None:
        """Add an entry."""
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self._board is not None:
            for name, value in figures.items():
                values = {name: value} if isinstance(value, float | int) else _numbered(name, value)
                for each, number in values.items():
                    self._board.add_scalar(each, number, step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _numbered(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/{number}": value for number, value in enumerate(values, 1)}
