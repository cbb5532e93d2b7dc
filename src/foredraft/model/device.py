"""Host to device without waiting.

Contract: the round reads the device once, at its end. A plain `torch.tensor(values, device="cuda")` would
make the host wait for all work under way, several times a round; a copy out of pinned memory does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device: `torch.tensor(values, dtype=dtype)` of numbers or lists, or a tensor as it is."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    pinned = device.type == "cuda" and made.device.type == "cpu"
    return (made.pin_memory() if pinned else made).to(device, non_blocking=True)
