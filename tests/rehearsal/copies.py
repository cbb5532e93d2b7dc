"""Copies within the pretended device, and between it and the host."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal.ledger import LEDGER, Violation
from tests.rehearsal.streams import index_of
from tests.rehearsal.tensors import Pretended, is_cuda, is_pinned, unwrap

aten = torch.ops.aten
PAGEABLE = "a copy from pageable memory"
COPIES = {aten.copy_, aten._to_copy}


def copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a copy; return the tensor copied to."""
    LEDGER.launches += 1
    if func.overloadpacket is aten._to_copy:
        return _to_copy(func, args[0], kwargs)
    target, source = args[0], args[1]
    quick = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    from_device, on_device = isinstance(source, Pretended), isinstance(target, Pretended)
    if on_device and not from_device and source.dim() == 0 and not is_pinned(source):
        LEDGER.wait(PAGEABLE)
    else:
        _moved(from_device, on_device, quick, source)
    func(unwrap(target), unwrap(source))
    if LEDGER.capture is not None:
        LEDGER.capture.record(func, (unwrap(target), unwrap(source)), {}, unwrap(target), target, [])
    return target


def _to_copy(func: Any, source: Tensor, kwargs: Any) -> Tensor:
    from_device, device = isinstance(source, Pretended), kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return func(unwrap(source), **kwargs)  # type: ignore[no-any-return]
    on_device = from_device if device is None else is_cuda(device)
    index = index_of(device) if is_cuda(device) else source.device.index or 0
    inner_kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} | {"non_blocking": False}
    if device is not None:
        inner_kwargs["device"] = torch.device("cpu")
    inner = func(unwrap(source), **inner_kwargs)
    if inner is unwrap(source):
        inner = inner.clone()
    _moved(from_device, on_device, kwargs.get("non_blocking", False), source)
    if not on_device:
        return inner  # type: ignore[no-any-return]
    made = Pretended(inner, index)
    if LEDGER.capture is not None:
        LEDGER.capture.record(func, (unwrap(source),), inner_kwargs, inner, made, [])
    return made


def _moved(from_device: bool, on_device: bool, quick: bool, source: Tensor) -> None:
    """Note what a copy makes the host wait for, and refuse one that a graph or the host would read too early."""
    if source.numel() == 0 or from_device == on_device:
        return
    if from_device:
        if quick:
            raise Violation("a copy to the host that does not wait: the host reads before it is done")
        LEDGER.wait("a copy to the host")
    elif not is_pinned(source):
        LEDGER.wait(PAGEABLE)
    elif not quick:
        LEDGER.wait("a copy from pinned memory that waits")
    elif LEDGER.capture is not None:
        raise Violation("a graph would copy from an address on the host")
    else:
        LEDGER.note("a copy from pinned memory")
        LEDGER.uploads.append((weakref.ref(source), source.clone()))
