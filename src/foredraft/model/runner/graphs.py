"""Recorded passes: on a GPU, a pass over a few rows is bound by the launches of its kernels; replaying a
recording of them is one launch.

Contract: a body is recorded once per bucket and cache, when the bucket is met for the second time, on input
buffers of its own; a replay copies the inputs in and a copy of the outputs out, so that nothing that a caller
holds is ever overwritten. A bounded number of recordings is kept for each cache, the ones used last, and they
go when the cache goes. Where recording fails, passes run as they are from then on, and the log says so once.

`Graphs` is the bookkeeping; a `Recorder` is what records, and `CudaRecorder` the only one here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.rope import Rope
from foredraft.model.runner.body import Body, Bucket, Forward, Inputs

logger = logging.getLogger(__name__)

BOUND = 64  # recordings of one cache
WARM_UP = 2  # runs before the recorded one: libraries choose kernels and take workspaces in their first
LENGTHS = 4  # attended lengths to a doubling: a recording for every length would be too many


@dataclass(frozen=True, slots=True)
class Recording:
    replay: Callable[[], None]
    output: Forward  # each replay overwrites it


class Recorder(Protocol):
    def record(self, body: Callable[[], Forward]) -> Recording:
        """Raises RuntimeError where it cannot."""
        ...


def coarse_length(length: int) -> int:
    """The attended length that recordings use for this one: one of a few to a doubling, and a multiple of the
    quantum (a power of two) if `length` is."""
    step = 1 << max(0, (length - 1).bit_length() - LENGTHS.bit_length())
    return -(-length // step) * step


class Graphs:
    """The recordings of one runner."""

    def __init__(self, recorder: Recorder, bound: int = BOUND) -> None:
        self.recorder: Recorder | None = recorder
        self.bound = bound
        # per cache, the ones used last at the end; None: met once
        self._kept: WeakKeyDictionary[KVCache, OrderedDict[_Key, _Entry | None]] = WeakKeyDictionary()

    def run(self, body: Body, bucket: Bucket, inputs: Inputs) -> Forward:
        """body(bucket, inputs), by replaying a recording where there is one."""
        if self.recorder is None:
            return body(bucket, inputs)
        kept = self._kept.setdefault(body.cache, OrderedDict())
        key = (bucket, inputs.signature())
        if key not in kept:
            kept[key] = None
            if len(kept) > self.bound:
                kept.popitem(last=False)
            return body(bucket, inputs)
        kept.move_to_end(key)
        entry = kept[key]
        if entry is None:
            entry = kept[key] = self._record(body, bucket, inputs)
        if entry is None:
            return body(bucket, inputs)
        return entry.run(inputs)

    def _record(self, body: Body, bucket: Bucket, inputs: Inputs) -> _Entry | None:
        assert self.recorder is not None
        buffers = inputs.copied()
        try:
            recording = self.recorder.record(lambda: body(bucket, buffers))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("passes cannot be recorded here (%s); they are launched kernel by kernel", reason)
            self.recorder = None
            self._kept.clear()
            return None
        return _Entry(buffers, recording, body.tables)


_Key = tuple[Bucket, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class _Entry:
    buffers: Inputs
    recording: Recording
    tables: Mapping[Rope, Tensor]  # that it reads: held, for the runner may have replaced them by longer ones

    def run(self, inputs: Inputs) -> Forward:
        self.buffers.fill(inputs)
        self.recording.replay()
        return self.recording.output.copied()


class CudaRecorder:
    """CUDA graphs, on one memory pool: replays follow each other on one stream, so they may share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, body: Callable[[], Forward]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP):
                        body()
                current.wait_stream(self.stream)
                # other threads may go on using the device
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ):
                    output = body()
            finally:
                # torch.cuda.graph leaves its own stream the current one where a recording cannot be ended
                torch.cuda.set_stream(current)
        return Recording(graph.replay, output)
