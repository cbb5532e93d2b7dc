"""Put the fakes of `torch.cuda` in their places, in this process and for good."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import graphs, streams
from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.tensors import LIVE, Mode, Pretended, is_pinned

MEMORY = 80 * 2**30  # bytes of the device
DRIVER = 2**29  # bytes of it that no program gets
MODES = {0: "default", 1: "warn", 2: "error"}
PROPERTIES = SimpleNamespace(
    name="a pretended GPU", major=9, minor=0, multi_processor_count=132, total_memory=MEMORY,
    L2_cache_size=50 * 2**20, warp_size=32, max_threads_per_multi_processor=2048,
)  # fmt: skip


def pretend(devices: int = 1) -> None:
    import torch._dynamo  # what a dispatch mode imports, before the fakes

    streams.use_devices(devices)
    for name, fake in _fakes(devices).items():
        setattr(torch.cuda, name, fake)
    torch.version.cuda = "13.0"
    Tensor.pin_memory = _pin_memory  # type: ignore[assignment, method-assign]
    Tensor.is_pinned = lambda self, device=None: is_pinned(self)  # type: ignore[assignment, method-assign]
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    _pretend_in_threads()
    Mode().__enter__()


def allocated(device: Any = None) -> int:
    """Return the bytes of a device's live tensors, in the allocator's multiples of 512."""
    index = streams.index_of(torch.device("cuda") if device is None else device)
    stores = {x.inner.untyped_storage()._cdata: x for x in list(LIVE) if x.device.index == index}
    return sum(-(-x.inner.untyped_storage().nbytes() // 512) * 512 for x in stores.values())


def _fakes(devices: int) -> dict[str, Any]:
    return {
        "CUDAGraph": graphs.Graph,
        "Event": streams.Event,
        "Stream": streams.Stream,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": streams.current_device,
        "current_stream": streams.current_stream,
        "device": streams.CurrentDevice,
        "device_count": lambda: devices,
        "empty_cache": lambda: LEDGER.note("empty_cache"),
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "graph": graphs.GraphCapture,
        "graph_pool_handle": object,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: LEDGER.capture is not None,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": allocated,
        "mem_get_info": lambda device=None: (MEMORY - allocated(device) - DRIVER, MEMORY),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": streams.set_device,
        "set_rng_state": lambda state, device=None: None,
        "set_stream": streams.set_stream,
        "set_sync_debug_mode": lambda mode: setattr(LEDGER, "mode", MODES.get(mode, mode)),
        "stream": streams.on_stream,
        "synchronize": lambda device=None: LEDGER.wait("torch.cuda.synchronize"),
    }


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if isinstance(self, Pretended):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    copy = self.detach().clone()
    copy._pretended_pinned = True  # type: ignore[attr-defined]
    return copy


def _pretend_in_threads() -> None:
    """Make every thread that starts from now on send its operators here, too."""
    started = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
        with Mode():
            started(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
