"""A tensor on the pretended device, which says "cuda:N" and holds a CPU tensor, and operators and copies on it.

An operator runs on the tensors inside, after CUDA's device rules are checked and the waits that PyTorch makes noted."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.rehearsal import orders
from tests.rehearsal.ledger import LEDGER, ROOT, Violation
from tests.rehearsal.streams import index_of

aten = torch.ops.aten

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


FREE_ATTENTION = "attention by a kernel of cuDNN"  # where PyTorch prefers it

PAGEABLE = "a copy from pageable memory"
COPIES = {aten.copy_, aten._to_copy}
# operators whose result or shape the host must read
WAITING = {
    aten._local_scalar_dense, aten.equal, aten.masked_select, aten.nonzero, aten.bincount, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.is_nonzero,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# run as a whole, because they choose another way by device
WHOLE = {
    aten.scaled_dot_product_attention, aten.rms_norm, aten.linear, aten.matmul, aten.embedding,
    aten.layer_norm, aten.silu, aten.gelu, aten.softmax, aten.log_softmax,
}  # fmt: skip
RESHAPES_IN_PLACE = {aten.resize_, aten.set_, aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_}
NO_HOST_NUMBERS = {
    aten.gather, aten.scatter, aten.cat, aten.mm, aten.bmm, aten.addmm, aten.embedding, aten.index_copy_,
    aten.index_select, aten.stack, aten.scatter_add, aten.index_add_, aten.masked_scatter,
}  # fmt: skip
ALLOCATING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_composite: dict[Any, bool] = {}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as the pretended device would; return its result, on that device or on the host."""
    packet = func.overloadpacket
    if packet not in WHOLE and _is_composite(func):
        with Mode():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, Pretended)]
    hosts = [x for x in tensors if not isinstance(x, Pretended)]
    if len({x.device.index for x in ours}) > 1 and packet is not aten.copy_:
        raise Violation(_mixed(func, tensors))
    if packet in COPIES:
        return _copied(func, args, kwargs)
    if packet in (aten.lift_fresh, aten.lift_fresh_copy):
        return args[0]
    if ours and hosts:
        _check_hosts(func, args, tensors, hosts)
    _note_waits(packet, args, kwargs, bool(ours))
    if packet is aten.scaled_dot_product_attention and ours and torch.backends.cuda.cudnn_sdp_enabled():
        LEDGER.note(FREE_ATTENTION)
    if packet is aten._local_scalar_dense:
        return func(args[0].inner)
    if packet is aten._fused_sdp_choice:
        return 0  # the mathematical definition
    to_device, index = bool(ours), ours[0].device.index if ours else 0
    if (device := kwargs.get("device")) is not None:
        to_device = is_cuda(device)
        index = index_of(device) if to_device else index
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    inner_args, inner_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    result = orders.run(func, inner_args, inner_kwargs)
    if to_device and packet not in ALLOCATING and (func._schema.is_mutable or not _is_view(result, ours)):
        LEDGER.launches += 1
    wrapped = _wrapped(result, ours, index) if to_device else result
    capture = LEDGER.capture
    if capture is not None and to_device and threading.get_ident() == capture.thread:
        capture.record(func, inner_args, inner_kwargs, result, wrapped, hosts)
    if packet in RESHAPES_IN_PLACE and ours:
        raise Violation(f"{func} changes a tensor's shape in place, which the rehearsal does not know")
    return wrapped


def _is_composite(func: Any) -> bool:
    if func not in _composite:
        key = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
        _composite[func] = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return _composite[func]


def _check_hosts(func: Any, args: Any, tensors: list[Tensor], hosts: list[Tensor]) -> None:
    """Check the host tensors of an operator on device tensors."""
    packet = func.overloadpacket
    if packet in INDEXING:
        indices = [x for x in args[1] if x is not None]
        for x in hosts:
            if any(x is index for index in indices):
                LEDGER.wait("an index on the host")
            elif x.dim():
                raise Violation(_mixed(func, tensors))
    elif packet is aten.set_ or packet in NO_HOST_NUMBERS or any(x.dim() for x in hosts):
        raise Violation(_mixed(func, tensors))
    elif packet is aten.where:  # moves it to the device by a copy that waits
        LEDGER.wait("a number on the host in where")


def _note_waits(packet: Any, args: Any, kwargs: Any, on_device: bool) -> None:
    if not on_device:
        return
    if packet in WAITING:
        LEDGER.wait(str(packet))
    elif packet in INDEXING:
        by_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        puts_number = packet is not aten.index and len(args) > 2 and args[2].numel() == 1
        if by_mask and not puts_number:
            LEDGER.wait("an index by a mask")
    elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
        LEDGER.wait("repeat_interleave")


def _wrapped(result: Any, ours: list[Any], index: int) -> Any:
    """Return the result of an operator as tensors of the device; a tensor changed in place is itself."""
    known = {id(x.inner): x for x in ours}
    bases = {x.inner.untyped_storage()._cdata: x for x in ours}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in known:
            return known[id(x)]
        base = bases.get(x.untyped_storage()._cdata)
        if base is not None and not base.is_inference() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a view of an ordinary tensor is one
                return Pretended(x, index)
        return Pretended(x, index)

    return tree_map(wrap, result)


def _is_view(result: Any, ours: list[Any]) -> bool:
    stores = {x.inner.untyped_storage()._cdata for x in ours}
    found = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    return bool(found) and all(x.untyped_storage()._cdata in stores for x in found)


def _mixed(func: Any, tensors: list[Tensor]) -> str:
    found = ", ".join(f"{x.device}{list(x.shape)}" for x in tensors)
    return f"Expected all tensors to be on the same device, but {func} got {found}"


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
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
