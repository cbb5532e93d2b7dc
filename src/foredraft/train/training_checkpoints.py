"""What a training run keeps in its folder: the journal of its steps, and checkpoints to go on from. Its
processes: one, or several that `torchrun` starts; the first one gathers and writes what they trained.

The last line may be cut by a kill, and does not count. A continued run drops what came after its checkpoint.

Contract: a checkpoint is read by its own run alone, whose digest it holds: of target, data and options, but
for the number of steps. The latest one is whole, whatever ended the run: it is written under another name,
which then takes its place, and the former one goes only after that. Reading one executes nothing
(`weights_only`). The first process writes the tensors whole, and any number of processes can read them.
"""

from __future__ import annotations

import gc
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from foredraft.errors import ConfigError, Option, shortened
from foredraft.files import errors_named, replacing
from foredraft.loading.runners import find_device
from foredraft.model.config import parse_json
from foredraft.train.students import Student

FILE, FOLDER = "metrics.jsonl", "tensorboard"
MAKE_ROOM = "make room, and run the same command again"  # a remedy
PREFIX, SUFFIX = "step-", ".pt"
STEPS = "step"  # what AdamW counts for each parameter: a scalar, on the CPU


def _refused(work: Path, problem: str) -> ConfigError:
    remedy = ("start anew with ", Option("fresh"))
    return ConfigError(f"whose {problem}", option="work", value=str(work), remedy=remedy)


def broken_line(file: Path, number: int, problem: str) -> ConfigError:
    """Return the error of a line that no run wrote."""
    return _refused(file.parent, f"{file.name} is broken: line {number} {problem}")


def whole_lines(file: Path) -> list[Any]:
    """Return the values of the whole lines of a file; none where there is no file."""
    if not file.is_file():
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise _refused(file.parent, f"{file.name} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _refused(file.parent, f"{file.name} is not UTF-8 text") from error
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(parse_json(line))
        except ValueError as error:
            raise broken_line(file, number, "is not JSON") from error
    return values


class Journal:
    """The figures of a run, those up to a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.file, kept = folder / FILE, []
        self._board: Any = None
        for number, entry in enumerate(whole_lines(self.file), 1):
            own = entry.get("step") if isinstance(entry, dict) else None
            if type(own) is not int:
                raise broken_line(self.file, number, 'is no JSON object with a "step"')
            kept += [f"{json.dumps(entry)}\n"] if own <= step else []
        with self._writing(), replacing(self.file) as new:
            new.write_text("".join(kept))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with self._writing():
            self._board = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)

    def write(self, step: int, figures: dict[str, float | list[float]]) -> None:
        """Add an entry."""
        with self._writing():
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
            for name, value in figures.items() if self._board is not None else ():
                for number, each in enumerate(value, 1) if isinstance(value, list) else [("", value)]:
                    self._board.add_scalar(f"{name}/{number}".rstrip("/"), each, step)

    def close(self) -> None:
        """Write what TensorBoard's part holds back."""
        if self._board is not None:
            with self._writing():
                self._board.close()

    def _writing(self) -> AbstractContextManager[None]:
        problem = f"in which {FILE} or {FOLDER} cannot be written"
        return errors_named(self.file.parent, "work", MAKE_ROOM, problem)


@dataclass(slots=True)
class TrainingProgress:
    """How far a run is."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens learned from, each as often as it was
    seconds: float = 0.0  # of training
    best: float = 0.0  # the best validated speed-up; 0 before the first validation
    worse: int = 0  # validations since then
    finished: bool = False  # training has ended


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train together."""

    rank: int = 0  # which of them this one is
    count: int = 1  # how many there are

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors gathered from the parts that processes have, detached and on the CPU."""
        gathered = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        return {name: tensor.detach().cpu() for name, tensor in gathered.items()}

    def shard(self, student: Student) -> None:
        """Leave each process a part of every parameter, which is gathered where it is used."""
        if self.count > 1:
            from torch.distributed.fsdp import fully_shard

            for part in student.shards():
                fully_shard(part)
            fully_shard(student)

    def part(self, student: Student) -> None:
        """Leave each process its part alone of what the last pass gathered, as an optimiser knows it."""
        if self.count > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in student.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


@contextmanager
def joined(name: str | None) -> Iterator[Processes]:
    """Join the processes that `torchrun` started, if it did, each with a GPU of its own."""
    count, device = int(os.environ.get("WORLD_SIZE", "1")), find_device(name)
    if count == 1:
        yield Processes()
        return
    if device.type == "cuda":
        device = _own_gpu(name)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        gc.collect()  # whatever refers to the processes keeps threads, which must end before Python does
        dist.destroy_process_group()


def _own_gpu(name: str | None) -> torch.device:
    """Return the GPU of this process among those of this machine."""
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if name not in (None, "cuda"):
        problem = f"but {here} processes train here, each on a GPU of its own"
        raise ConfigError(problem, option="device", value=name, remedy="give 'cuda' or 'cpu'")
    if here > gpus:
        problem = f"but {here} processes train here, and PyTorch sees {gpus} GPUs"
        remedy = f"start {gpus} processes, or give 'cpu'"
        raise ConfigError(problem, option="device", value="cuda", remedy=remedy)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class TrainingCheckpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, processes: Processes, run: str) -> None:
        self.folder, self.processes, self.run = folder, processes, run

    @property
    def latest(self) -> Path | None:
        """The last checkpoint."""
        found = {}
        for path in self.folder.glob(f"{PREFIX}*"):
            if path.is_dir() or path.suffix == ".safetensors":
                raise self._unfit(path, "is that of an earlier version, which is not read any more")
            number = path.name.removeprefix(PREFIX).removesuffix(SUFFIX)
            if path.suffix == SUFFIX and number.isascii() and number.isdecimal():
                found[int(number)] = path
        return found[max(found)] if found else None

    def _file(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step}{SUFFIX}"

    def _unfit(self, file: Path, problem: str) -> ConfigError:
        return _refused(self.folder.parent, f"checkpoint {file.name} {problem}")

    def save(self, student: Student, optimizer: Optimizer, progress: TrainingProgress) -> None:
        """Write a checkpoint, and remove the former one."""
        self.processes.part(student)
        parameters = dict(student.named_parameters())
        content = {
            "run": self.run,
            "progress": asdict(progress),
            "student": self.processes.whole(parameters),
            "optimizer": {name: self.processes.whole(optimizer.state[p]) for name, p in parameters.items()},
        }
        if self.processes.first:
            former, file = self.latest, self._file(progress.step)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(file) as new, new.open("wb") as opened:
                    torch.save(content, opened)
                if former is not None and former != file:
                    former.unlink()
            except (OSError, RuntimeError) as error:
                # PyTorch raises an error of its own in place of the system's
                cause = error if isinstance(error, OSError) else error.__context__
                why = getattr(cause, "strerror", error)
                problem = f"in which a checkpoint cannot be written ({why}); the one before it is whole"
                place = str(self.folder)
                raise ConfigError(problem, option="work", value=place, remedy=MAKE_ROOM) from error
        self.processes.wait()

    @torch.no_grad()
    def restore(self, student: Student, optimizer: Optimizer) -> TrainingProgress | None:
        """Read the latest checkpoint, each process its part of it; None: there is none."""
        file = self.latest
        if file is None:
            return None
        content = self._read(file)
        parameters = dict(student.named_parameters())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        held = {name: tensor.shape for name, tensor in content["student"].items()}
        if different := sorted(name for name in shapes | held if shapes.get(name) != held.get(name)):
            # another version may train other ones
            name = shortened(different[0])
            raise self._unfit(file, f"differs in tensor {name}, so it is that of another run")
        for name, parameter in parameters.items():
            parameter.copy_(_part(content["student"][name], parameter))
            optimizer.state[parameter] = {
                key: value if key == STEPS else _part(value, parameter)
                for key, value in content["optimizer"][name].items()
            }
        return TrainingProgress(**content["progress"])

    def _read(self, file: Path) -> dict[str, Any]:
        """Return the content of a file that is a checkpoint of this run."""
        try:
            damaged = zipfile.ZipFile(file).testzip()  # PyTorch does not compare the checksums
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            run, progress = content["run"], TrainingProgress(**content["progress"])
        except Exception as error:  # they raise many kinds
            raise self._unfit(file, f"cannot be read ({shortened(str(error))})") from error
        if damaged is not None:
            raise self._unfit(file, f"is damaged in {damaged}")
        if run != self.run:
            raise self._unfit(file, "is that of a run of another target, other data or other options")
        if self._file(progress.step) != file:
            raise self._unfit(file, f"is that of step {progress.step}")
        return content


def _part(value: Tensor, parameter: Tensor) -> Tensor:
    """Return what this process has of a value that is shaped and divided as a parameter is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
