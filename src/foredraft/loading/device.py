"""Devices: which device a name means, and whether it computes correctly in a dtype."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from foredraft.errors import ConfigError, Option
from foredraft.loading.capacity import DEVICES
from foredraft.model.transfers import dtype_name

__all__ = ["check_dtype", "find_device"]

logger = logging.getLogger(__name__)

NATIVE_BFLOAT16 = (8, 0)  # the compute capability from which GPUs compute in bfloat16 natively


def find_device(name: str | None) -> torch.device:
    """Return the device of a name; None is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: The name means no device, or one that is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = ConfigError(option="device", value=name, remedy="give 'cpu', 'cuda' or 'cuda:N'")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError):  # the last for numbers that are too large
        raise unknown from None
    kind, _, index = str(name).partition(":")
    if kind not in DEVICES:
        raise unknown
    if kind == "cpu" and index:
        raise ConfigError("but there is one CPU", option="device", value=name, remedy="give 'cpu'")
    if kind == "cuda":
        _check_gpu(name, int(index or 0))
    return device


def _check_gpu(name: str, index: int) -> None:
    """Raise ConfigError where there is no GPU of an index, which `torch.device` takes modulo 256."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(
            "but this PyTorch sees no CUDA device", option="device", value=name, remedy="give 'cpu'"
        )
    if index >= count:
        known = ", ".join(f"cuda:{index}" for index in range(count))
        raise ConfigError(
            f"but this PyTorch sees only {known}", option="device", value=name, remedy="give one of these"
        )


@torch.inference_mode()
def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Run the operators of a layer in a dtype once; log a warning where a GPU emulates bfloat16.

    Raises:
        ConfigError: An operator fails or computes wrong values.
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
            f"which {device} cannot compute in ({reason})",
            option="dtype",
            value=name,
            remedy=_other_dtypes(name),
        ) from None
    if not torch.allclose(found, F.silu(torch.ones(8, 8)), atol=0.01):
        raise ConfigError(
            f"in which {device} computes wrong values", option="dtype", value=name, remedy=_other_dtypes(name)
        )
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


def _other_dtypes(name: str) -> tuple[str | Option, ...]:
    """Return the remedy that names the dtypes other than `name`."""
    first, second = (other for other in ("float32", "bfloat16", "float16") if other != name)
    return "give ", Option("dtype", first), " or ", Option("dtype", second)
