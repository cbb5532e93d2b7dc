"""The kernels of attention that a GPU may take: not cuDNN's, which are built per shape and thread.

Contract: PyTorch chooses a kernel of `scaled_dot_product_attention` by shape and by process-wide settings. On
Hopper and Blackwell it prefers cuDNN's, whose plan for a shape may be another one in another thread or
process, so that a self-check proves nothing about later passes. Within `PINNED` cuDNN's are out: `attention`
makes each of its calls so, for the self-check, the passes and the drafters alike. Flash attention takes no
mask. Of the two kinds that are left, memory-efficient and mathematical, PyTorch takes the first that knows
the dtype and the size of the heads, at every shape. The user's setting is back when the last call has left.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["pinned_attention"]


class _Pinned:
    """A context that several threads may be within at the same time."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


PINNED, FREE = _Pinned(), nullcontext()


def pinned_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention on a device takes the kernels that the self-check has tried."""
    return PINNED if device.type == "cuda" else FREE
