"""CUDA graphs on the pretended device: a capture's operators, with the host's numbers, which a replay runs again.

Later graphs of the pool may use memory that no tensor holds: the graph spoils it after its capture and each replay."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.streams import DEFAULT, Stream, current_stream, on_stream
from tests.rehearsal.tensors import Pretended


@dataclass(frozen=True)
class _Operator:
    func: Any
    args: Any
    kwargs: Any
    outs: list[Tensor]
    fresh: bool  # its results lie in memory of their own


@dataclass
class _Capture:
    thread: int = field(default_factory=threading.get_ident)
    operators: list[_Operator] = field(default_factory=list)
    results: list[weakref.ref[Any]] = field(default_factory=list)

    def record(
        self, func: Any, args: Any, kwargs: Any, result: Any, wrapped: Any, hosts: list[Tensor]
    ) -> None:
        outs, ins = _tensors(result), _tensors((args, kwargs))
        if hosts:  # the number that the host has now stays in the graph
            args, kwargs = tree_map(
                lambda x: x.clone() if any(x is host for host in hosts) else x, (args, kwargs)
            )
        stores = {x.untyped_storage()._cdata for x in ins}
        fresh = not any(x.untyped_storage()._cdata in stores for x in outs)
        self.operators.append(_Operator(func, args, kwargs, outs, fresh))
        self.results += [weakref.ref(x) for x in _tensors(wrapped) if isinstance(x, Pretended)]


class Graph:
    """`torch.cuda.CUDAGraph`; counts the graphs that were made, and their replays."""

    made: ClassVar[int] = 0
    replays: ClassVar[int] = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture = _Capture()
        self._usable = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if LEDGER.capture is not None:
            raise RuntimeError("CUDA error: another capture is underway")
        if current_stream() is DEFAULT:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if capture_error_mode == "global":
            LEDGER.note("a capture that other threads can break")
        self._capture = _Capture()
        LEDGER.capture = self._capture

    def capture_end(self) -> None:
        LEDGER.capture = None
        self._usable = True
        Graph.made += 1
        LEDGER.note("a graph captured")
        self._spoil()

    def replay(self) -> None:
        assert self._usable, "the capture failed"
        Graph.replays += 1
        LEDGER.launches += 1
        with torch.inference_mode():
            for each in self._capture.operators:
                if each.fresh:
                    again = _tensors(each.func(*each.args, **each.kwargs))
                    for out, new in zip(each.outs, again, strict=True):
                        out.copy_(new)
                elif each.func._schema.is_mutable:
                    each.func(*each.args, **each.kwargs)
        self._spoil()

    def reset(self) -> None:
        self._usable = False

    def _spoil(self) -> None:
        capture = self._capture
        held = {x.inner.untyped_storage()._cdata for ref in capture.results if (x := ref()) is not None}
        for each in capture.operators:
            for out in each.outs:
                if each.fresh and out.untyped_storage()._cdata not in held:
                    _spoilt(out)


class GraphCapture:
    """`torch.cuda.graph`, the context that captures."""

    def __init__(
        self, cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self.graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode
        self.context = on_stream(stream or Stream())

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.context.__enter__()
        self.graph.capture_begin(pool=self.pool, capture_error_mode=self.mode)

    def __exit__(self, *error: Any) -> None:
        self.graph.capture_end()
        if error[0] is not None:  # a real device raises in capture_end; then the stream stays current
            self.graph.reset()
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.context.__exit__(*error)


def _tensors(x: Any) -> list[Tensor]:
    return [each for each in tree_flatten(x)[0] if isinstance(each, Tensor)]


def _spoilt(x: Tensor) -> None:
    if not x.numel():
        return
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.logical_not_()
    else:
        x.fill_(-0x55)
