"""Streams, events and the current device of a thread. Work on the pretended device is done at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.rehearsal.guard import GUARD
from tests.rehearsal.ledger import LEDGER

_devices = 1
_of_thread = threading.local()


def use_devices(count: int) -> None:
    global _devices
    _devices = count
    GUARD.pretend_devices(count)


def current_device() -> int:
    """Return the index of the current device, which belongs to the thread, as in CUDA."""
    return int(GUARD.pretend_current_device())


def index_of(device: Any) -> int:
    """Return the index of a device; one without an index is the current device of this thread."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        return current_device()
    if index >= _devices:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return int(index)


def set_device(device: Any) -> None:
    GUARD.pretend_set_device(index_of(device))


class CurrentDevice:
    """`torch.cuda.device`: another current device inside the block."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        GUARD.pretend_set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        GUARD.pretend_set_device(self.before)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", current_device() if device is None else index_of(device))

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None:
        LEDGER.wait("Stream.synchronize")


DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", DEFAULT)


def set_stream(stream: Stream) -> None:
    _of_thread.stream = stream


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[Stream]:
    """`torch.cuda.stream`: another current stream inside the block."""
    before = current_stream()
    set_stream(stream)
    yield stream
    set_stream(before)


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        LEDGER.wait("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1000
