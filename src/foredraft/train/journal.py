"""Journal: one JSON object a step in `metrics.jsonl`, and the figures for TensorBoard where it is installed.

The file is the record; TensorBoard shows it. A run that is continued drops what came after its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.files import replacing
from foredraft.train.kept_lines import broken_line, whole_lines

__all__ = ["Journal"]

FILE, FOLDER = "metrics.jsonl", "tensorboard"


class Journal:
    """The figures of a run.

    Args:
        folder: Holds them.
        step: The last step that counts; entries of later ones are dropped.

    Raises:
        ConfigError: The journal cannot be read or written, or holds what is no entry.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.file = folder / FILE
        self._board: Any = None
        kept = [
            json.dumps(entry)
            for number, entry in enumerate(whole_lines(self.file), 1)
            if self._step_of(number, entry) <= step
        ]
        with self._writing(), replacing(self.file) as new:
            new.write_text("".join(f"{line}\n" for line in kept))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with self._writing():
            self._board = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)

    def _step_of(self, number: int, entry: Any) -> int:
        step = entry.get("step") if isinstance(entry, dict) else None
        if type(step) is not int:
            raise broken_line(self.file, number, 'is no JSON object with a "step"')
        return step

    def write(self, step: int, figures: dict[str, float | list[float]]) -> None:
        """Add an entry.

        Raises:
            ConfigError: It cannot be written.
        """
        with self._writing():
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
            if self._board is not None:
                for name, value in figures.items():
                    values = {name: value} if isinstance(value, float | int) else _numbered(name, value)
                    for each, number in values.items():
                        self._board.add_scalar(each, number, step)

    def close(self) -> None:
        """Write what TensorBoard's part holds back.

        Raises:
            ConfigError: It cannot be written.
        """
        if self._board is not None:
            with self._writing():
                self._board.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"in which {FILE} or {FOLDER} cannot be written ({error.strerror})", option="work",
                value=str(self.file.parent), remedy="make room, and run the same command again",
            ) from error  # fmt: skip


def _numbered(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/{number}": value for number, value in enumerate(values, 1)}
