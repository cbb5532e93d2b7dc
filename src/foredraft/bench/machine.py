"""The machine: what it is, how fast its memory can be read, and how much of it this process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import torch

import foredraft
from foredraft.bench.records import Bandwidth
from foredraft.loading.memory import free_memory
from foredraft.model.device import synchronise

__all__ = ["Memory", "bandwidth", "machine"]

BYTES = 2**30  # read, or copied, at a time: more than any cache holds
TRIES = 20
INTERVAL = 0.005  # seconds between two looks at the memory held


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Whatever figures depend on, as plain values."""
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
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "foredraft": foredraft.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if device is not None and device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def bandwidth(device: torch.device) -> Bandwidth | None:
    """What memory gives at its best. CPU: reading; CUDA: copying, bytes read and written. None where there is
    not enough of it to see."""
    if free_memory(device) < 2 * BYTES:
        return None
    many = f"best of {TRIES}, {BYTES / 2**30:g} GiB each"
    source = torch.ones(BYTES // 4, device=device)
    if device.type == "cuda":
        target = torch.empty_like(source)
        seconds = _least(lambda: target.copy_(source), device)
        return Bandwidth(2 * BYTES / seconds, f"device copy, bytes read and written, {many}")
    seconds = _least(source.sum, device)
    threads = torch.get_num_threads()
    return Bandwidth(BYTES / seconds, f"read: float32 sum, {threads} thread{'s'[: threads > 1]}, {many}")


def _least(action: Any, device: torch.device) -> float:
    seconds = []
    for _ in range(TRIES):
        synchronise(device)
        start = time.perf_counter()
        action()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Memory:
    """Bytes that this process holds: on a CPU its resident set, in which files that several have mapped count
    for each of them, on CUDA what PyTorch allocated. Not known on a CPU without psutil."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = device.type == "cuda" or find_spec("psutil") is not None

    def held(self) -> int:
        if not self.known:
            return 0
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        import psutil

        return int(psutil.Process().memory_info().rss)

    def settled(self) -> int:
        """What is held once all that is no longer used was given back, so that whoever comes next does not
        seem to need less."""
        gc.collect()
        with suppress(OSError, AttributeError, TypeError):  # of the C library of GNU systems
            ctypes.CDLL(None).malloc_trim(0)
        return self.held()

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """While entered, looks at what is held; then the list has the most that was added since."""
        most: list[int] = []
        before = self.settled()
        if not self.known or self.device.type == "cuda":
            if self.known:
                torch.cuda.reset_peak_memory_stats(self.device)
            yield most
            most.append(torch.cuda.max_memory_allocated(self.device) - before if self.known else 0)
            return
        over = threading.Event()
        seen = [before]

        def look() -> None:
            while not over.wait(INTERVAL):
                seen.append(self.held())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield most
        finally:
            over.set()
            watcher.join()
        most.append(max(*seen, self.held()) - before)
