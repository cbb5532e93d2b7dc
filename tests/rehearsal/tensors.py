"""A tensor on the pretended device: it says "cuda:N" and holds a CPU tensor, on which its operators run."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.ledger import LEDGER, ROOT, Violation

LIVE: weakref.WeakSet[Any] = weakref.WeakSet()  # all pretended tensors: their memory is what is allocated
ADDRESS = 0x00DEAD0000000000  # what `data_ptr` gives to PyTorch itself: never to be read
# what gives addresses to the C kernels; others note them for kernels that do not run on a device
BY_KERNELS = tuple(
    str(ROOT / "src/foredraft" / part) for part in ("kernels", "model/runner/native", "model/quantisation")
)
NO_NUMPY = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."


class Pretended(Tensor):
    """A tensor on the pretended device, which stands for a CPU tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, index: int = 0) -> Any:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=torch.device("cuda", index), requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        LIVE.add(made)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.rehearsal.operators import dispatch

        return dispatch(func, args, kwargs or {})

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"Pretended({self.inner!r}, device='{self.device}')"

    def tolist(self) -> Any:
        if self.numel():  # an empty tensor is not copied
            LEDGER.wait("tolist")
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(NO_NUMPY)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(NO_NUMPY)

    def data_ptr(self) -> int:
        if sys._getframe(1).f_code.co_filename.startswith(BY_KERNELS):
            raise Violation("the address of a device tensor is given to code on the host")
        return ADDRESS

    def __deepcopy__(self, memo: Any) -> Any:
        return Pretended(self.inner.clone(), self.device.index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Violation("a device tensor is pickled")


class Mode(TorchDispatchMode):
    """Sends factories on "cuda", and all operators on pretended tensors, to `dispatch`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.rehearsal.operators import dispatch

        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None:
            device = next((x for x in args if isinstance(x, torch.device)), None)
        if is_cuda(device) or any(issubclass(each, Pretended) for each in types):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def is_pinned(x: Tensor) -> bool:
    return getattr(x, "_pretended_pinned", False)


def unwrap(x: Any) -> Any:
    """Return the CPU tensor in a pretended one; anything else as it is."""
    return x.inner if isinstance(x, Pretended) else x
