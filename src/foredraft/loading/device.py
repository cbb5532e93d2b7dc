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
    """Return the device of a name; None is the current GPU, or the CPU where there is none.

    A GPU has its index: the current one belongs to a thread, and other threads decode.

    Raises:
        ConfigError: The name means no device, or one that is not there.
    """
    if name is None:
        return _indexed(torch.device("cuda")) if torch.cuda.is_available() else torch.device("cpu")
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
        return _indexed(device)
    return device


def _indexed(device: torch.device) -> torch.device:
    """Return a GPU with its index."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


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
        ConfigError: An operator fails or computes wrong values in the dtype, or this PyTorch computes nothing
            on the device.
    """
    name = dtype_name(dtype)
    try:
        found = _layer_of_ones(device, dtype)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        if device.type == "cuda" and (dtype == torch.float32 or not _computes(device)):
            raise ConfigError(
                f"on which this PyTorch cannot compute ({reason})", option="device", value=str(device),
                remedy=("install a PyTorch that is built for this GPU, or give ", Option("device", "cpu")),
            ) from None  # fmt: skip
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


def _layer_of_ones(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return what the operators of a layer make of ones, on the CPU."""
    x = torch.ones(1, 1, 8, 64, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 8, 8, device=device, dtype=dtype)
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return F.silu(F.rms_norm(F.linear(x[0, 0], x[0, 0]), (8,))).float().cpu()


def _computes(device: torch.device) -> bool:
    """Return whether a device computes in float32, which every GPU can."""
    try:
        _layer_of_ones(device, torch.float32)
    except RuntimeError:
        return False
    return True


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
