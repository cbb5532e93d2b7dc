"""CUDA graphs: a pass over a few rows spends its time on kernel launches, and a graph replay is one launch.

Contract: a computation is captured once for each key, structure of its inputs (`trees`) and owner, which for
a pass is its cache: when these occur for the second time, on input buffers of its own. A replay copies the
inputs in and a copy of the outputs out, so no result in a caller's hands is overwritten. The graphs of an
owner are bounded in number, and in the bytes that they keep: the least recently used go first, and all go
with their owner. Captures take a bounded share of the runs. After one that fails, none is tried for a while,
and for twice as long after each further one; the log says so once.

`Graphs` keeps the graphs; a `GraphCapturer` makes them, and `CudaGraphCapturer` is the only one in this
package.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foredraft.model.runner.trees import copied, fill, flattened, rebuilt

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # per owner: the widths and attended lengths of a few requests
# Bytes of inputs and results that the graphs of one owner keep, at most. The plan of memory counts them
# (`loading.capacity`): a pass of 32 rows of 16 columns of an 8 B model has 4 MiB of states.
KEPT_BYTES: Final = 2**27
WARM_UP = 2  # runs before the capture, in which libraries choose kernels and allocate workspaces
FAILURE_PASSES = 512  # after a capture that fails, perhaps for want of memory, before the next one is tried
MAX_DOUBLINGS = 8  # of these passes, one for each further failure in a row
# A capture waits for the device and takes about as long as so many replayed passes. So passes pay for
# captures, and a busy engine whose batches keep changing shape spends at most half of its time on them.
CAPTURE_PASSES = 16
SAVED_PASSES = 48 * CAPTURE_PASSES  # what may be saved up: a new engine captures its first shapes at once
LENGTHS_PER_DOUBLING = 4  # attended lengths of graphs; a graph for every length would be too many

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured computation.

    Attributes:
        replay: Runs it again on the same buffers.
        output: Its result, a tree, which each replay overwrites.
    """

    replay: Callable[[], None]
    output: Any


class GraphCapturer(Protocol):
    """The maker of graphs."""

    def capture(self, compute: Callable[[], Any]) -> CapturedGraph:
        """Capture a computation.

        Raises:
            RuntimeError: It cannot be captured.
        """
        ...


def coarse_length(length: int) -> int:
    """Round an attended length up to one that graphs use: a few lengths per doubling.

    The result is a multiple of the quantum (a power of two) if `length` is.
    """
    step = 1 << max(0, (length - 1).bit_length() - LENGTHS_PER_DOUBLING.bit_length())
    return -(-length // step) * step


class Graphs:
    """The captured graphs of one user, such as a runner.

    Args:
        capturer: Makes the graphs.
        bound: The graphs of one owner, at most.
        kept_bytes: Bytes of their inputs and results, at most; the latest graph is kept in any case.

    Attributes:
        failures: Captures that failed since the last one that did not.
        unsettled: Runs in this process, of all users, whose key was new or was just captured.
    """

    unsettled: ClassVar[int] = 0

    def __init__(
        self, capturer: GraphCapturer, bound: int = MAX_GRAPHS, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.capturer, self.bound, self.kept_bytes, self.failures = capturer, bound, kept_bytes, 0
        # by owner, in the order of use; None: the key has occurred
        self._kept: WeakKeyDictionary[Any, OrderedDict[_Key, _Entry | None]] = WeakKeyDictionary()
        self._saved, self._warned = SAVED_PASSES, False

    def run(
        self, compute: Callable[[In], Out], inputs: In, *, owner: object, key: Hashable, alive: object = None
    ) -> Out:
        """Return compute(inputs), by replaying a graph where there is one.

        Args:
            compute: Reads no other value than the inputs, the owner and the key.
            inputs: A tree.
            owner: The graphs go with it.
            key: Tells computations apart.
            alive: What a graph reads besides its buffers and the owner; it is kept alive with the graph.
        """
        self._saved = min(self._saved + 1, SAVED_PASSES)
        kept = self._kept.setdefault(owner, OrderedDict())
        tensors, structure = flattened(inputs)
        whole_key = (key, structure)
        if whole_key not in kept:
            Graphs.unsettled += 1
            kept[whole_key] = None
            if len(kept) > self.bound:
                kept.popitem(last=False)
            return compute(inputs)
        kept.move_to_end(whole_key)
        entry = kept[whole_key]
        if entry is None and self._saved >= CAPTURE_PASSES:
            Graphs.unsettled += 1
            self._saved -= CAPTURE_PASSES
            entry = kept[whole_key] = self._capture(compute, inputs, alive)
            self._shrink(kept)
        if not entry:
            return compute(inputs)
        result: Out = entry.run(tensors)
        return result

    def _shrink(self, kept: OrderedDict[_Key, _Entry | None]) -> None:
        """Drop the least recently used graphs of an owner until the others keep few enough bytes."""
        graphs = {key: entry.nbytes for key, entry in kept.items() if entry is not None}
        total = sum(graphs.values())
        for key in [*graphs][:-1]:
            if total <= self.kept_bytes:
                return
            total -= graphs[key]
            del kept[key]

    def _capture(self, compute: Callable[[In], object], inputs: In, alive: object) -> _Entry | None:
        """Capture a computation; None: the capture fails."""
        buffers = copied(inputs)
        tensors = flattened(buffers)[0]
        try:
            # New objects in every run: a value that one keeps of the run before would not be captured.
            graph = self.capturer.capture(lambda: compute(rebuilt(buffers, tensors)))
        except RuntimeError as error:
            self._saved = CAPTURE_PASSES - (FAILURE_PASSES << min(self.failures, MAX_DOUBLINGS))
            self.failures += 1
            if not self._warned:
                reason = str(error).splitlines()[0]
                logger.warning(
                    "a CUDA graph cannot be captured now (%s); passes launch every kernel meanwhile", reason
                )
                self._warned = True
            return None
        self.failures = 0
        return _Entry(tensors, graph, alive)


_Key = tuple[Hashable, tuple[object, ...]]
_CAPTURES: Final = threading.Lock()  # one capture at a time in this process, whatever its models and threads


@dataclass(frozen=True, slots=True)
class _Entry:
    buffers: list[Tensor]
    graph: CapturedGraph
    alive: object  # read by the graph, while the runner may have replaced its own

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers and of its results."""
        return sum(x.nbytes for x in (*self.buffers, *flattened(self.graph.output)[0]))

    def run(self, inputs: list[Tensor]) -> Any:
        fill(self.buffers, inputs)
        self.graph.replay()
        return copied(self.graph.output)


class CudaGraphCapturer:
    """Captures CUDA graphs in one memory pool, which they can share because they replay one after another.

    Captures are of mode thread_local: other threads, those of the user's program among them, may allocate and
    wait meanwhile, and what this thread must not do while it captures is still an error. (Mode "global" lets
    another thread break the capture; "relaxed" lets this thread record what a replay does not repeat.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept: PyTorch may still refer to a broken one

    def capture(self, compute: Callable[[], Any]) -> CapturedGraph:
        """Run a computation a few times, then capture it; see `GraphCapturer`."""
        graph = torch.cuda.CUDAGraph()
        with _CAPTURES, torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    for _ in range(WARM_UP):
                        compute()
                current.wait_stream(self.stream)
                with torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ):
                    output = compute()
            except RuntimeError:
                self._failed.append(graph)
                raise
            finally:
                # after a failed capture, torch.cuda.graph leaves its own stream as the current one
                torch.cuda.set_stream(current)
        return CapturedGraph(graph.replay, output)
