"""CUDA graphs: a pass over a few rows spends its time on kernel launches, and a graph replay is one launch.

Contract: a pass is captured once per bucket and cache, when the bucket occurs for the second time, on input
buffers of its own. A replay copies the inputs in and a copy of the outputs out, so no result in a caller's
hands is overwritten. Each cache has a bounded number of graphs, the least recently used go first, and all go
with their cache. Where a capture fails, passes run uncaptured from then on, and the log says so once.

`Graphs` keeps the graphs; a `GraphCapturer` makes them, and `CudaGraphCapturer` is the only one in this
package.
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

from foredraft.model.cache import CacheLayers
from foredraft.model.rope import Rope
from foredraft.model.runner.body import Body, Bucket, Forward, Inputs

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # per cache: the widths and attended lengths of a few requests
WARM_UP = 2  # runs before the capture, in which libraries choose kernels and allocate workspaces
LENGTHS_PER_DOUBLING = 4  # attended lengths of graphs; a graph for every length would be too many


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured pass.

    Attributes:
        replay: Runs the pass again on the same buffers.
        output: The result of the pass, which each replay overwrites.
    """

    replay: Callable[[], None]
    output: Forward


class GraphCapturer(Protocol):
    """The maker of graphs."""

    def capture(self, body: Callable[[], Forward]) -> CapturedGraph:
        """Capture a pass.

        Raises:
            RuntimeError: The pass cannot be captured.
        """
        ...


def coarse_length(length: int) -> int:
    """Round an attended length up to one that graphs use: a few lengths per doubling.

    The result is a multiple of the quantum (a power of two) if `length` is.
    """
    step = 1 << max(0, (length - 1).bit_length() - LENGTHS_PER_DOUBLING.bit_length())
    return -(-length // step) * step


class Graphs:
    """The captured graphs of one runner.

    Args:
        capturer: Makes the graphs.
        bound: The graphs of one cache, at most.
    """

    def __init__(self, capturer: GraphCapturer, bound: int = MAX_GRAPHS) -> None:
        self.capturer: GraphCapturer | None = capturer
        self.bound = bound
        # by cache, in the order of use; None: the bucket has occurred once
        self._kept: WeakKeyDictionary[CacheLayers, OrderedDict[_Key, _Entry | None]] = WeakKeyDictionary()

    def run(self, body: Body, bucket: Bucket, inputs: Inputs) -> Forward:
        """Return body(bucket, inputs), by replaying a graph where there is one."""
        if self.capturer is None:
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
            entry = kept[key] = self._capture(body, bucket, inputs)
        if entry is None:
            return body(bucket, inputs)
        return entry.run(inputs)

    def _capture(self, body: Body, bucket: Bucket, inputs: Inputs) -> _Entry | None:
        """Capture a pass; None: captures fail here, and no further one is tried."""
        assert self.capturer is not None
        buffers = inputs.copied()
        try:
            graph = self.capturer.capture(lambda: body(bucket, buffers))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("CUDA graphs cannot be captured here (%s); passes launch every kernel", reason)
            self.capturer = None
            self._kept.clear()
            return None
        return _Entry(buffers, graph, body.tables)


_Key = tuple[Bucket, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class _Entry:
    buffers: Inputs
    graph: CapturedGraph
    tables: Mapping[Rope, Tensor]  # read by the graph; kept alive, because the runner may replace its own

    def run(self, inputs: Inputs) -> Forward:
        self.buffers.fill(inputs)
        self.graph.replay()
        return self.graph.output.copied()


class CudaGraphCapturer:
    """Captures CUDA graphs in one memory pool, which they can share because they replay one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, body: Callable[[], Forward]) -> CapturedGraph:
        """Run a pass a few times, then capture it; see `GraphCapturer`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP):
                        body()
                current.wait_stream(self.stream)
                # thread_local: other threads may use the device meanwhile
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ):
                    output = body()
            finally:
                # after a failed capture, torch.cuda.graph leaves its own stream as the current one
                torch.cuda.set_stream(current)
        return CapturedGraph(graph.replay, output)
