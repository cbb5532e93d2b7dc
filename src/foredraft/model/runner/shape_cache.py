"""What the self-check found, kept between runs in the user's cache folder.

Contract: only what probing finds is kept, for it depends on shapes, machine and code alone, and all of these
are in the key. The confirmation on the model's own layers also depends on their weights; it is short, and
runs at every load. What found no agreement is not kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from foredraft import user_cache
from foredraft.kernels.machine import describe_cpu
from foredraft.model import attention, layers
from foredraft.model.decoder import Decoder
from foredraft.model.runner import packed, probes, shapes
from foredraft.model.runner.packed import packs
from foredraft.model.runner.shapes import ExactShapes

KIND = "shapes"  # of the user's cache
CODE = (attention, layers, packed, probes, shapes)  # what probes and what is probed
# variables by which the libraries underneath choose their kernels
KERNELS = ("ATEN_", "CUBLAS", "CUDNN", "DNNL_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "TORCH_")


def cached_shapes(
    outline: Decoder, device: torch.device, probe: Callable[[Decoder, torch.device], ExactShapes]
) -> ExactShapes:
    """What `probe` finds, or found here before under the same circumstances."""
    key = _circumstances(outline, device)
    if (kept := _parsed(user_cache.read(KIND, key))) is not None:
        return kept
    found = probe(outline, device)
    if found.found:
        user_cache.write(KIND, key, asdict(found))
    return found


def _circumstances(outline: Decoder, device: torch.device) -> dict[str, Any]:
    """Everything that could change what probing finds."""
    backends: Any = torch.backends
    return {
        "model": repr(outline.spec),
        "dtype": str(outline.dtype),
        "packed": packs(device, outline.dtype),
        "device": [device.type, *(_gpu(device) if device.type == "cuda" else describe_cpu())],
        "threads": torch.get_num_threads(),
        "torch": [torch.__version__, torch.__config__.show()],
        "settings": [
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            backends.mkldnn.is_available() and backends.mkldnn.enabled,
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        ],
        "environment": sorted(
            f"{name}={value}" for name, value in os.environ.items() if name.startswith(KERNELS)
        ),
        "code": [_hash_of(module.__file__) for module in CODE],
    }


def _gpu(device: torch.device) -> list[str]:
    about = torch.cuda.get_device_properties(device)
    cudnn: Any = torch.backends.cudnn
    return [
        about.name,
        f"{about.major}.{about.minor}",
        str(about.multi_processor_count),
        str(torch.version.cuda),
        str(cudnn.version()),
    ]


def _hash_of(file: str | None) -> str:
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _parsed(document: Any) -> ExactShapes | None:
    try:
        found = ExactShapes(**document | {"query_buckets": tuple(document["query_buckets"])})
        return found if _sensible(found) else None
    except (LookupError, TypeError):
        return None


def _sensible(found: ExactShapes) -> bool:
    """Whether the self-check could have found it."""
    numbers = (*found.query_buckets, found.row_low, found.row_high, found.length_quantum, found.row_step)
    return (
        all(type(number) is int for number in numbers)
        and found.found is True
        and type(found.apart) is bool
        and found.length_quantum in shapes.QUANTA
        and len(found.query_buckets) > 1
        and list(found.query_buckets) == [n for n in shapes.QUERIES if n in found.query_buckets]
        and {found.row_low, found.row_high} <= set(shapes.ROWS)
        and found.row_low <= shapes.REFERENCE <= found.row_high
        and found.row_step in shapes.STEPS
    )
