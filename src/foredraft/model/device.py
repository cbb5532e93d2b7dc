"""Host to device without waiting.

Contract: the round reads the device once, at its end. A plain `torch.tensor(values, device="cuda")` would
make the host wait for all work under way, several times a round; a copy out of pinned memory does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on the device; numbers, or lists of them."""
    made = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)
