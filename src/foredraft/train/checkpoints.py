"""Checkpoints of a run: parameters, optimiser and progress, of one process or of several.

Contract: the latest checkpoint is whole, whatever ended the run. One is written under another name, which
then takes its place; the former one goes only after that. PyTorch's distributed checkpoint writes the
tensors, each process its own part, and any number of processes can read them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from foredraft.errors import ConfigError
from foredraft.train.processes import Processes

__all__ = ["Checkpoints", "Progress"]

PREFIX, PARTIAL, PROGRESS = "step-", ".partial", "progress.json"


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done.
        tokens: Tokens learned from, each as often as it was.
        seconds: Of training.
        best: The best validated speed-up; 0 before the first validation.
        worse: Validations since then.
        finished: Training has ended.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    worse: int = 0
    finished: bool = False


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: Holds them.
        processes: Those that train.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes

    @property
    def latest(self) -> Path | None:
        """The folder of the last whole checkpoint."""
        whole = [path for path in self.folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
        return max(whole, key=lambda path: int(path.name[len(PREFIX) :]), default=None)

    def save(self, student: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
        """Write a checkpoint, and remove the former one.

        Raises:
            ConfigError: The disk is full, or the folder cannot be written; the former one stays.
        """
        former, name = self.latest, f"{PREFIX}{progress.step}"
        partial = self.folder / f"{name}{PARTIAL}"
        try:
            if self.processes.first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.processes.wait()
            with _of_one_process():
                save(
                    _tensors(student, optimizer),
                    checkpoint_id=partial,
                    no_dist=self.processes.count == 1,
                )
            if self.processes.first:
                (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
                shutil.rmtree(self.folder / name, ignore_errors=True)
                partial.rename(self.folder / name)
                if former is not None and former.name != name:
                    shutil.rmtree(former)
            self.processes.wait()
        except (OSError, CheckpointException) as error:
            raise _unwritable(self.folder, error) from error

    def restore(self, student: nn.Module, optimizer: Optimizer) -> Progress | None:
        """Read the latest checkpoint into student and optimiser; None: there is none."""
        latest = self.latest
        if latest is None:
            return None
        tensors = _tensors(student, optimizer)
        with _of_one_process():
            load(tensors, checkpoint_id=latest, no_dist=self.processes.count == 1)
        set_state_dict(
            student, optimizer, model_state_dict=tensors["student"], optim_state_dict=tensors["optimizer"]
        )
        return Progress(**json.loads((latest / PROGRESS).read_text()))


@contextmanager
def _of_one_process() -> Iterator[None]:
    """Hide PyTorch's remark that a single process reads or writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _tensors(student: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(student, optimizer)
    return {"student": weights, "optimizer": moments}


def _unwritable(folder: Path, error: BaseException) -> ConfigError:
    failures = getattr(error, "failures", None)
    reason = next(iter(failures.values()))[0] if failures else error
    words = getattr(reason, "strerror", None) or next(iter(str(reason).splitlines()), "")
    return ConfigError(
        f"in which a checkpoint cannot be written ({words}); the one before it is whole", option="work",
        value=str(folder), remedy="make room, and run the same command again",
    )  # fmt: skip
