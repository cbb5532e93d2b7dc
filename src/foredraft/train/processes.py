"""Processes: one, or several that `torchrun` starts; the first one gathers and writes what they trained."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foredraft.drafters.heads.settings import SETTINGS
from foredraft.errors import ConfigError
from foredraft.loading.runners import find_device
from foredraft.model.safetensors_file import SINGLE
from foredraft.model.spec import CONFIG
from foredraft.train.students import Student


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


def holds_a_head(is_kind: Callable[[Path], bool], folder: Path) -> bool:
    """Return whether a folder holds a head of a kind, and nothing besides."""
    return is_kind(folder) and {file.name for file in folder.iterdir()} <= {CONFIG, SINGLE, SETTINGS}
