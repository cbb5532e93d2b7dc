"""Count host-device synchronisations on a CPU: places where the host would wait for a GPU.

The host waits where it reads a tensor's values, and where it makes a tensor from values without `upload`. The count
covers what `torch.cuda.set_sync_debug_mode` reports, and also `tolist` of small tensors, which that check misses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.model.memory import upload

UPLOAD = upload.__code__
SOURCE = str(Path(UPLOAD.co_filename).parents[1])
aten = torch.ops.aten
# operators whose result or shape the host must read
WAITING = {aten._local_scalar_dense, aten.equal, aten.masked_select, aten.nonzero, aten.bincount}
WAITING |= {aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave}
MASKED = {aten.index, aten.index_put, aten.index_put_}  # with a boolean index, they run nonzero first
READS = {Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.__array__}
MAKES = {torch.tensor, torch.as_tensor, torch.from_numpy}
# on a CPU, one_hot reads its input for a check; on a GPU, the kernel checks
# (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Onehot.cpp)
EXCUSED = {torch.nn.functional.one_hot}


class Waits:
    """Collects synchronisations, with `no_grad` for inference mode, which hides reads of single values."""

    def __init__(self) -> None:
        self.found: list[str] = []  # each synchronisation, with the line of the library that caused it
        self._modes = (_Functions(self), _Operators(self))
        self._patch = pytest.MonkeyPatch()
        self._host: list[Tensor] = []  # tensors on the host and those made of them: reading these is free
        self._excused = 0

    def __enter__(self) -> Waits:
        for name in ("__enter__", "__exit__"):
            self._patch.setattr(torch.inference_mode, name, getattr(torch.no_grad, name))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._patch.undo()

    def note(self, what: str) -> None:
        if not self._excused:
            self.found.append(f"{what} at {_line()}")


class _Functions(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, name = self.waits, getattr(function, "__name__", str(function))
        on_host = bool(args) and any(args[0] is known for known in waits._host)
        if function in READS and not on_host:
            waits.note(name)
        elif function in MAKES and sys._getframe(1).f_code is not UPLOAD:
            waits.note(f"{name} without upload")
        elif function in (Tensor.__getitem__, Tensor.__setitem__) and _has_list(args[1]):
            waits.note("an index of Python numbers")
        waits._excused += function in EXCUSED
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            waits._excused -= function in EXCUSED
        if function is Tensor.cpu or on_host:
            waits._host += result if isinstance(result, tuple | list) else [result]
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, masks = operator.overloadpacket, (torch.bool, torch.uint8)
        if packet in WAITING:
            self.waits.note(str(operator))
        elif packet in MASKED and any(x is not None and x.dtype in masks for x in args[1]):
            self.waits.note(f"{operator} by a mask")
        return operator(*args, **(kwargs or {}))


def _has_list(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


def _line() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def counted(function: Callable[..., Any], counts: list[list[str]]) -> Callable[..., Any]:
    def calls(*args: Any, **kwargs: Any) -> Any:
        with Waits() as waits:
            result = function(*args, **kwargs)
        counts.append(waits.found)
        return result

    return calls
