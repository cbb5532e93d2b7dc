"""CUDA graphs: a pass over a few rows spends its time on kernel launches, and a graph replay is one launch.

Contract: a pass is captured once per shape and cache, when the shape occurs for the second time, on input
buffers of its own. A replay copies the inputs in and a copy of the outputs out, so no result in a caller's
hands is overwritten. Each cache has a bounded number of graphs, the least recently used go first, and all go
with their cache. Where a capture fails, passes run uncaptured from then on, and the log says so once.

`Graphs` keeps the graphs; a `GraphCapturer` makes them, and `CudaGraphCapturer` is the only one in this
package.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch

from foredraft.model.cache import CacheLayers
from foredraft.model.forward_context import PassInputs, PassShape
from foredraft.model.runner.passes import Forward

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # per cache: the widths and attended lengths of a few requests
WARM_UP = 2  # runs before the capture, in which libraries choose kernels and allocate workspaces
LENGTHS_PER_DOUBLING = 4  # attended lengths of graphs; a graph for every length would be too many


# computes a pass of a shape over a cache, and reads no other values than the inputs
Compute: TypeAlias = Callable[[CacheLayers, PassShape, PassInputs], Forward]


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

    def capture(self, compute: Callable[[], Forward]) -> CapturedGraph:
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
        # by cache, in the order of use; None: the shape has occurred once
        self._kept: WeakKeyDictionary[CacheLayers, OrderedDict[_Key, _Entry | None]] = WeakKeyDictionary()

    def run(
        self, compute: Compute, cache: CacheLayers, shape: PassShape, inputs: PassInputs, alive: object
    ) -> Forward:
        """Return compute(cache, shape, inputs), by replaying a graph where there is one.

        Args:
            compute: The pass.
            cache: Its KV cache.
            shape: Its shape.
            inputs: Its inputs.
            alive: What a graph reads besides its buffers and the cache; it is kept alive with the graph.
        """
        if self.capturer is None:
            return compute(cache, shape, inputs)
        kept = self._kept.setdefault(cache, OrderedDict())
        key = (shape, inputs.signature())
        if key not in kept:
            kept[key] = None
            if len(kept) > self.bound:
                kept.popitem(last=False)
            return compute(cache, shape, inputs)
        kept.move_to_end(key)
        entry = kept[key]
        if entry is None:
            entry = kept[key] = self._capture(compute, cache, shape, inputs, alive)
        if entry is None:
            return compute(cache, shape, inputs)
        return entry.run(inputs)

    def _capture(
        self, compute: Compute, cache: CacheLayers, shape: PassShape, inputs: PassInputs, alive: object
    ) -> _Entry | None:
        """Capture a pass; None: captures fail here, and no further one is tried."""
        assert self.capturer is not None
        buffers = inputs.copied()
        try:
            graph = self.capturer.capture(lambda: compute(cache, shape, buffers))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("CUDA graphs cannot be captured here (%s); passes launch every kernel", reason)
            self.capturer = None
            self._kept.clear()
            return None
        return _Entry(buffers, graph, alive)


_Key = tuple[PassShape, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class _Entry:
    buffers: PassInputs
    graph: CapturedGraph
    alive: object  # read by the graph, while the runner may have replaced its own

    def run(self, inputs: PassInputs) -> Forward:
        self.buffers.fill(inputs)
        self.graph.replay()
        return self.graph.output.copied()


class CudaGraphCapturer:
    """Captures CUDA graphs in one memory pool, which they can share because they replay one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Callable[[], Forward]) -> CapturedGraph:
        """Run a pass a few times, then capture it; see `GraphCapturer`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP):
                        compute()
                current.wait_stream(self.stream)
                # thread_local: other threads may use the device meanwhile
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ):
                    output = compute()
            finally:
                # after a failed capture, torch.cuda.graph leaves its own stream as the current one
                torch.cuda.set_stream(current)
        return CapturedGraph(graph.replay, output)
