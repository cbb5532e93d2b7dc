"""Processes: one, or several that `torchrun` starts, each with a part of the student and of every step."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foredraft.train.students import Student

__all__ = ["Processes", "joined"]


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train together.

    Attributes:
        rank: Which of them this one is.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

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
def joined(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started, if it did, until the block ends."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        gc.collect()  # whatever refers to the processes keeps threads, which must end before Python does
        dist.destroy_process_group()
