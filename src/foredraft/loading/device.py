"""Devices: which one a name means, and whether it computes in a dtype."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from foredraft.errors import ConfigError
from foredraft.loading.capacity import DEVICES
from foredraft.model.device import dtype_name

__all__ = ["check_dtype", "find_device"]

logger = logging.getLogger(__name__)

NATIVE_BFLOAT16 = (8, 0)  # the compute capability from which GPUs have it


def find_device(name: str | None) -> torch.device:
    """The device of that name, which is there; None is the first GPU, or the CPU where there is none."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = ConfigError(f"device is {name!r}; give 'cpu', 'cuda' or 'cuda:N'")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise unknown from None
    kind, _, index = str(name).partition(":")
    if kind not in DEVICES:
        raise unknown
    if kind == "cpu" and index:
        raise ConfigError(f"device is {name!r}, but there is one CPU; give 'cpu'")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(f"device is {name!r}, but this PyTorch sees no CUDA device; give 'cpu'")
        if int(index or 0) >= count:  # of the name: torch.device counts modulo 256
            known = ", ".join(f"cuda:{index}" for index in range(count))
            raise ConfigError(f"device is {name!r}, but this PyTorch sees only {known}; give one of these")
    return device


@torch.inference_mode()
def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Try what a model is made of. Bfloat16 that a GPU emulates is only slow, and so only logged.

    Raises ConfigError where an operator fails or computes wrong values.
    """
    name = dtype_name(dtype)
    try:
        x = torch.ones(1, 1, 8, 64, device=device, dtype=dtype)
        mask = torch.zeros(1, 1, 8, 8, device=device, dtype=dtype)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        found = F.silu(F.rms_norm(F.linear(x[0, 0], x[0, 0]), (8,))).float().cpu()
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"dtype is {name!r}, which {device} cannot compute in ({reason}); {_instead(name)}"
        ) from None
    if not torch.allclose(found, F.silu(torch.ones(8, 8)), atol=0.01):
        raise ConfigError(f"dtype is {name!r}, in which {device} computes wrong values; {_instead(name)}")
    if device.type == "cuda":
        _warn_of_emulation(device, dtype)


def _warn_of_emulation(device: torch.device, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability(device)
    if dtype == torch.bfloat16 and capability < NATIVE_BFLOAT16:
        logger.warning(
            "%s (compute capability %d.%d) emulates bfloat16, slowly; float16 is faster there",
            torch.cuda.get_device_name(device),
            *capability,
        )


def _instead(name: str) -> str:
    others = [f"'{other}'" for other in ("float32", "bfloat16", "float16") if other != name]
    return f"give dtype={' or '.join(others)}"
