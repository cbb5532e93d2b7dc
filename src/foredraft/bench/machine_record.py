"""The machine and the model: what they are, the memory bandwidth, and the bytes that one step reads."""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import foredraft
from foredraft.bench.bench_records import Bandwidth, ModelRecord
from foredraft.loading.machine_limits import free_memory
from foredraft.model.memory import dtype_name, release_freed
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.profiling.timing import timed

BYTES = 2**30  # bytes read or copied per measurement: more than any CPU or GPU cache holds
TRIES = 20  # measurements of which the fastest counts: other processes only ever slow one down
INTERVAL = 0.005  # seconds between two samples of the resident memory


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return a description of the machine and the software, as plain values."""
    model = platform.processor() or "unknown"
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as lines:
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    found = {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": load_average(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "foredraft": foredraft.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if device is not None and device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


class LoadWatch:
    """Passes progress on, and remembers the highest load average, of the last minute, at any of its steps."""

    def __init__(self, progress: Callable[..., None]) -> None:
        self.progress, self.highest = progress, load_average()

    def __call__(self, stage: str, done: int, total: int, *more: str) -> None:
        if self.highest is not None:
            self.highest = max(self.highest, load_average() or 0.0)
        self.progress(stage, done, total, *more)


def load_average() -> float | None:
    """Return the load average of the last minute; None where the system has none, as Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def bandwidth(device: torch.device) -> Bandwidth | None:
    """Measure the peak memory bandwidth: of reads on a CPU, of copies on CUDA (bytes read plus written)."""
    if free_memory(device) < 2 * BYTES:
        return None
    many = f"best of {TRIES}, {BYTES / 2**30:g} GiB each"
    source = torch.ones(BYTES // 4, device=device)
    if device.type == "cuda":
        target = torch.empty_like(source)
        seconds = min(timed(lambda: target.copy_(source), device)[0] for _ in range(TRIES))
        return Bandwidth(2 * BYTES / seconds, f"device copy, bytes read and written, {many}")
    seconds = min(timed(source.sum, device)[0] for _ in range(TRIES))
    threads = torch.get_num_threads()
    return Bandwidth(BYTES / seconds, f"read: float32 sum, {threads} thread{'s'[: threads > 1]}, {many}")


class Memory:
    """The memory that this process holds: on a CPU its resident set, on CUDA what PyTorch has allocated.

    On a CPU without psutil all figures are 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.measurable = device.type == "cuda" or find_spec("psutil") is not None

    def held(self) -> int:
        """Return the memory that this process holds now, in bytes."""
        if not self.measurable:
            return 0
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        import psutil

        return int(psutil.Process().memory_info().rss)

    def held_after_release(self) -> int:
        """Release unused memory, which the next program could reuse, to the system; return the bytes held."""
        release_freed()
        return self.held()

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Measure the peak of the memory added while entered."""
        peaks: list[int] = []
        before = self.held_after_release()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield peaks
            peaks.append(torch.cuda.max_memory_allocated(self.device) - before)
            return
        stopped, samples = threading.Event(), [before]

        def sample() -> None:
            while not stopped.wait(INTERVAL):
                samples.append(self.held())

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            yield peaks
        finally:
            stopped.set()
            sampler.join()
        peaks.append(max(*samples, self.held()) - before)


def model_record(role: str, name: str, runner: Runner, weights: str | None = None) -> ModelRecord:
    """Return the record of a loaded model.

    A tied head counts once. An untied embedding counts as parameters but not as bytes per step, which looks
    up rows.
    """
    decoder = runner.decoder
    read = sum(size for part in (decoder.layers, decoder.norm, decoder.output) for size in _elements(part))
    coded = [product for product in decoder.products if isinstance(product, NativeCodes)]
    saved = sum(math.prod(each.shape) * decoder.dtype.itemsize - each.weight.nbytes for each in coded)
    looked_up = 0 if decoder.spec.tied else decoder.spec.vocab_size * decoder.spec.hidden_size
    return ModelRecord(
        role=role,
        name=name,
        parameters=read + looked_up,
        step_bytes=read * decoder.dtype.itemsize - saved,
        dtype=dtype_name(decoder.dtype),
        weights=weights,
    )


def _elements(part: Any) -> Iterator[int]:
    """Yield the number of elements of each weight of a part that a step reads."""
    if isinstance(part, Tensor):
        yield part.numel()
    elif isinstance(part, tuple):
        for item in part:
            yield from _elements(item)
    elif hasattr(part, "shape"):  # a linear layer; the tensor of a packed one may be padded
        yield part.shape[0] * part.shape[1]
        yield from _elements(part.bias)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _elements(getattr(part, field.name))
