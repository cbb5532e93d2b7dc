"""Checkpoints of a run: parameters, optimiser and progress, one safetensors file a checkpoint.

    checkpoints/step-400.safetensors
        student/layer.self_attn.q_proj.weight              a parameter
        optimizer/exp_avg/layer.self_attn.q_proj.weight    what the optimiser keeps of it (`MOMENTS`)
        header: {"progress": "{\"step\": 400, ...}", "run": "9f86d081..."}

Contract: a checkpoint is read by its own run alone. The digest in its header names the run: target, data and
options, but for the number of steps. The latest checkpoint is whole, whatever ended the run. One is written
under another name, which then takes its place; the former one goes only after that. Reading one executes
nothing that it holds: the file is numbers and JSON, each of which is checked. The first process writes the
tensors whole, and any number of processes can read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from foredraft.errors import CheckpointError, ConfigError, Option, shortened
from foredraft.files import replacing
from foredraft.model.config import MAX_FLOAT, parse_json
from foredraft.model.safetensors_file import SafetensorsFile, write_tensors
from foredraft.train.processes import Processes
from foredraft.train.students import Student

__all__ = ["TrainingCheckpoints", "TrainingProgress"]

PREFIX, SUFFIX = "step-", ".safetensors"
PROGRESS, RUN = "progress", "run"  # of the header
STEPS = "step"  # what AdamW counts for each parameter, a scalar
MOMENTS = (STEPS, "exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


@dataclass(slots=True)
class TrainingProgress:
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

    @classmethod
    def read(cls, text: object) -> TrainingProgress:
        """Return the progress that a text holds as JSON.

        Raises:
            ValueError: It holds anything else.
        """
        found = parse_json(text) if isinstance(text, str) else None
        if not isinstance(found, dict):
            raise ValueError("does not say how far the run is")
        types = {each.name: type(each.default) for each in fields(cls)}
        if found.keys() != types.keys():
            [name, *_] = sorted(found.keys() ^ types.keys())
            raise ValueError(f"has {'the unknown' if name in found else 'no'} field {shortened(name)}")
        for name, kind in types.items():
            value = found[name]
            fits = type(value) in (int, float) if kind is float else type(value) is kind
            if not fits or not 0 <= value <= MAX_FLOAT:
                raise ValueError(f"has the {name} {shortened(value)}")
        return cls(**found)


class TrainingCheckpoints:
    """The checkpoints in a folder.

    Args:
        folder: Holds them.
        processes: Those that train.
        run: The digest of the run.
    """

    def __init__(self, folder: Path, processes: Processes, run: str) -> None:
        self.folder, self.processes, self.run = folder, processes, run

    @property
    def latest(self) -> Path | None:
        """The last checkpoint.

        Raises:
            ConfigError: The folder holds one that is no file of this version.
        """
        found = {}
        for path in self.folder.glob(f"{PREFIX}*"):
            if path.is_dir():
                raise _refused(path, "is a folder, as earlier versions wrote, which is not read any more")
            number = path.name.removeprefix(PREFIX).removesuffix(SUFFIX)
            if path.suffix == SUFFIX and number.isascii() and number.isdecimal():
                found[int(number)] = path
        return found[max(found)] if found else None

    def save(self, student: Student, optimizer: Optimizer, progress: TrainingProgress) -> None:
        """Write a checkpoint, and remove the former one.

        Raises:
            ConfigError: The disk is full, or the folder cannot be written; the former one stays.
        """
        self.processes.part(student)
        tensors = self.processes.whole(dict(_held(student, optimizer)))
        if self.processes.first:
            former, file = self.latest, self._file(progress.step)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as new:
                    header = {PROGRESS: json.dumps(asdict(progress)), RUN: self.run}
                    write_tensors(new, tensors, header)
                if former is not None and former != file:
                    former.unlink()
            except OSError as error:
                raise _unwritable(self.folder, error) from error
        self.processes.wait()

    def restore(self, student: Student, optimizer: Optimizer) -> TrainingProgress | None:
        """Read the latest checkpoint into student and optimiser; None: there is none.

        Raises:
            ConfigError: The checkpoint is broken, or that of another run.
        """
        latest = self.latest
        if latest is None:
            return None
        try:
            with SafetensorsFile(latest) as file:
                if file.metadata.get(RUN) != self.run:
                    raise ValueError("is that of a run of another target, other data or other options")
                progress = TrainingProgress.read(file.metadata.get(PROGRESS))
                if self._file(progress.step) != latest:
                    raise ValueError(f"is that of step {progress.step}")
                _check(file, student)
                _read(file, student, optimizer)
        except CheckpointError as error:
            raise _refused(latest, f"cannot be read ({error.problem})") from error
        except ValueError as error:
            raise _refused(latest, str(error)) from error
        return progress

    def _file(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step}{SUFFIX}"


def _held(student: Student, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint by name, as far as this process has them."""
    for name, parameter in student.named_parameters():
        yield _student(name), parameter
        for moment in MOMENTS:
            yield _moment(moment, name), optimizer.state[parameter][moment]


def _check(file: SafetensorsFile, student: Student) -> None:
    """Check that a file holds the tensors of a student and its optimiser, before one of them is taken over.

    Raises:
        ValueError: A tensor is missing, too many, of another shape or dtype, or not finite.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in student.named_parameters():
        shape = tuple(parameter.shape)
        shapes[_student(name)] = shape
        shapes |= {_moment(moment, name): () if moment == STEPS else shape for moment in MOMENTS}
    if different := sorted(shapes.keys() ^ file.tensors.keys()):
        has = "has" if different[0] in file.tensors else "lacks"
        raise ValueError(f"{has} tensor {shortened(different[0])}, so it is that of another run")
    for name, shape in shapes.items():
        info = file.tensors[name]
        if info.shape != shape or info.dtype != "F32":
            raise ValueError(
                f"has tensor {name} of shape {[*info.shape]} and dtype {info.dtype}, not {[*shape]} and F32,"
                " so it is that of another run"
            )
        if not torch.isfinite(file.get_tensor(name)).all():
            raise ValueError(f"has tensor {name} with values that are not finite")


@torch.no_grad()
def _read(file: SafetensorsFile, student: Student, optimizer: Optimizer) -> None:
    """Take over the tensors of a file that `_check` has accepted; each process takes its part."""
    for name, parameter in student.named_parameters():
        parameter.copy_(_part(file.get_tensor(_student(name)), parameter))
        state = {moment: file.get_tensor(_moment(moment, name)) for moment in MOMENTS}
        # a copy, because the tensors of a file are read only; AdamW counts its steps on the CPU
        optimizer.state[parameter] = {
            moment: value.clone() if moment == STEPS else _part(value, parameter).clone()
            for moment, value in state.items()
        }


def _part(value: Tensor, parameter: Tensor) -> Tensor:
    """Return what this process has of a value that is shaped and divided as a parameter is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _student(name: str) -> str:
    return f"student/{name}"


def _moment(moment: str, name: str) -> str:
    return f"optimizer/{moment}/{name}"


def _refused(checkpoint: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"whose checkpoint {checkpoint.name} {problem}", option="work", value=str(checkpoint.parent.parent),
        remedy=("start anew with ", Option("fresh")),
    )  # fmt: skip


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"in which a checkpoint cannot be written ({error.strerror}); the one before it is whole",
        option="work", value=str(folder), remedy="make room, and run the same command again",
    )  # fmt: skip
