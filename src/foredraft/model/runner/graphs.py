"""CUDA graphs: a pass over a few rows spends its time on kernel launches, and a graph replay is one launch.

A computation is captured when its key, the structure of its inputs and their owner occur for the second time,
on input buffers of its own; a replay copies inputs in and outputs out. The graphs of an owner are bounded in
number and bytes, and all go with it. After a capture that fails, none is tried for a while. A tree is a
tensor, a dataclass, a tuple, list or dict of trees, or any other hashable value; its *structure* is all but
its tensors' values, so no graph has a host value of another input baked in.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foredraft.model.runner.passes import Captures

logger = logging.getLogger(__name__)


T = TypeVar("T")


def flattened(tree: object) -> tuple[list[Tensor], tuple[object, ...]]:
    """Return the tensors of a tree, and its structure, which is hashable where its other values are."""
    tensors: list[Tensor] = []
    structure: list[object] = []

    _flatten(tree, tensors, structure)
    return tensors, tuple(structure)


# A function of the module: one within `flattened` would be in a circle with the tensors, which would live on.
def _flatten(tree: object, tensors: list[Tensor], structure: list[object]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        structure.append((tree.shape, tree.dtype))
        return
    kind, parts, _ = _taken_apart(tree)
    structure.append(kind)
    for part in parts:
        _flatten(part, tensors, structure)


def copied(tree: T) -> T:
    tensors, _ = flattened(tree)
    fresh = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    fill(fresh, tensors)
    return rebuilt(tree, fresh)


def rebuilt(tree: T, tensors: Sequence[Tensor]) -> T:
    """Return a tree of the same structure with these tensors, in new objects that have cached nothing."""
    found: T = _rebuilt(tree, iter(tensors).__next__)
    return found


def fill(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes and dtypes, by one launch for each dtype on a GPU."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for mine, theirs in zip(into, values, strict=True):
        if mine.numel():
            to, source = by_dtype.setdefault(mine.dtype, ([], []))
            to.append(mine)
            source.append(theirs)
    for to, source in by_dtype.values():
        torch._foreach_copy_(to, source, non_blocking=True)


def _rebuilt(tree: Any, next_tensor: Callable[[], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next_tensor()
    _, parts, joined = _taken_apart(tree)
    return joined([_rebuilt(part, next_tensor) for part in parts])


def _taken_apart(tree: Any) -> tuple[object, Collection[Any], Callable[[list[Any]], Any]]:
    """Return what a tree is besides its parts, these, and what makes such a tree of other parts."""
    if (names := _names(type(tree))) is not None:  # type: ignore[arg-type]
        parts = [getattr(tree, name) for name in names]
        return type(tree), parts, lambda parts: type(tree)(**dict(zip(names, parts, strict=True)))
    if isinstance(tree, dict):
        return tuple(tree), tree.values(), lambda parts: dict(zip(tree, parts, strict=True))
    if isinstance(tree, (tuple, list)):
        return len(tree), tree, type(tree)
    return tree, (), lambda _: tree


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None


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
    replay: Callable[[], None]  # runs it again on the same buffers
    output: Any  # its result, a tree, which each replay overwrites


def coarse_length(length: int) -> int:
    """Round an attended length up to one of a few per doubling; it stays a multiple of its quantum."""
    step = 1 << max(0, (length - 1).bit_length() - LENGTHS_PER_DOUBLING.bit_length())
    return -(-length // step) * step


class Graphs:
    def __init__(
        self, capturer: CudaGraphCapturer, bound: int = MAX_GRAPHS, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.capturer, self.bound, self.kept_bytes, self.failures = capturer, bound, kept_bytes, 0
        # by owner, in the order of use; None: the key has occurred
        self._kept: WeakKeyDictionary[Any, OrderedDict[_Key, _Entry | None]] = WeakKeyDictionary()
        self._saved, self._warned = SAVED_PASSES, False

    def run(
        self, compute: Callable[[In], Out], inputs: In, *, owner: object, key: Hashable, alive: object = None
    ) -> Out:
        """Return compute(inputs), by replaying a graph where there is one."""
        self._saved = min(self._saved + 1, SAVED_PASSES)
        kept = self._kept.setdefault(owner, OrderedDict())
        tensors, structure = flattened(inputs)
        whole_key = (key, structure)
        if whole_key not in kept:
            Captures.unsettled += 1
            kept[whole_key] = None
            if len(kept) > self.bound:
                kept.popitem(last=False)
            return compute(inputs)
        kept.move_to_end(whole_key)
        entry = kept[whole_key]
        if entry is None and self._saved >= CAPTURE_PASSES:
            Captures.unsettled += 1
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
                message = "a CUDA graph cannot be captured now (%s); passes launch every kernel meanwhile"
                logger.warning(message, reason)
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
        return sum(x.nbytes for x in (*self.buffers, *flattened(self.graph.output)[0]))

    def run(self, inputs: list[Tensor]) -> Any:
        fill(self.buffers, inputs)
        self.graph.replay()
        return copied(self.graph.output)


class CudaGraphCapturer:
    """Captures CUDA graphs in one memory pool, which they can share because they replay one after another.

    In mode thread_local, other threads may allocate and wait meanwhile. ("global" lets another thread break
    the capture; "relaxed" lets this one record what a replay does not repeat.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed: list[torch.cuda.CUDAGraph] = []  # kept: PyTorch may still refer to a broken one

    def capture(self, compute: Callable[[], Any]) -> CapturedGraph:
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
