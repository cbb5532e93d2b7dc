"""The machine: its description, its memory bandwidth, and the memory that this process holds."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import torch

import foredraft
from foredraft.bench.bench_records import Bandwidth
from foredraft.loading.free_memory import free_memory
from foredraft.model.freed import release_freed
from foredraft.model.transfers import synchronise

__all__ = ["LoadWatch", "Memory", "bandwidth", "machine"]

BYTES = 2**30  # bytes read or copied per measurement: more than any CPU or GPU cache holds
TRIES = 20  # measurements of which the fastest counts: other processes only ever slow one down
INTERVAL = 0.005  # seconds between two samples of the resident memory


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return a description of the machine and the software, as plain values.

    Args:
        device: A GPU to describe too, if the figures come from one.
    """
    model = platform.processor() or "unknown"
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
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
    """Measure the peak memory bandwidth: of reads on a CPU, of copies on CUDA (bytes read plus written).

    Returns:
        The bandwidth, or None where too little memory is free to measure it.
    """
    if free_memory(device) < 2 * BYTES:
        return None
    many = f"best of {TRIES}, {BYTES / 2**30:g} GiB each"
    source = torch.ones(BYTES // 4, device=device)
    if device.type == "cuda":
        target = torch.empty_like(source)
        seconds = _fastest(lambda: target.copy_(source), device)
        return Bandwidth(2 * BYTES / seconds, f"device copy, bytes read and written, {many}")
    seconds = _fastest(source.sum, device)
    threads = torch.get_num_threads()
    return Bandwidth(BYTES / seconds, f"read: float32 sum, {threads} thread{'s'[: threads > 1]}, {many}")


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(TRIES):
        synchronise(device)
        start = time.perf_counter()
        action()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Memory:
    """The memory that this process holds: on a CPU its resident set, on CUDA what PyTorch has allocated.

    A resident set counts shared pages of mapped files in every process. On a CPU the memory is not measurable
    without psutil; all figures are then 0.
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
        """Release unused memory to the system, then return the memory held, in bytes.

        Otherwise the next program could reuse freed memory and would seem to need less.
        """
        release_freed()
        return self.held()

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Measure the peak of the memory added while entered.

        Yields:
            A list that receives the peak, in bytes, on exit.
        """
        peaks: list[int] = []
        before = self.held_after_release()
        if not self.measurable or self.device.type == "cuda":
            if self.measurable:
                torch.cuda.reset_peak_memory_stats(self.device)
            yield peaks
            peaks.append(torch.cuda.max_memory_allocated(self.device) - before if self.measurable else 0)
            return
        stopped = threading.Event()
        samples = [before]

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
