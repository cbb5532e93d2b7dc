"""The result of probing for batch-invariant shapes, kept in the user's cache between runs.

It depends on shapes, machine and code alone, and the cache key holds all of these. The confirmation on the
model's own layers depends on their weights, too, and runs at every load. A result without such shapes is not
kept.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from foredraft import user_cache
from foredraft.kernels.compilation import describe_cpu
from foredraft.model.decoder import Decoder
from foredraft.model.kept_weights import code_digest
from foredraft.model.layers import RowSpan
from foredraft.model.runner.compiled import unpacked_because
from foredraft.model.runner.invariant_shapes import InvariantShapes, probe_shapes

KIND = "shapes"  # of the user's cache
# prefixes of the variables by which the libraries below PyTorch choose their kernels
VARIABLES = ("ATEN_", "CUBLAS", "CUDNN", "DNNL_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "TORCH_")


def cached_shapes(outline: Decoder, device: torch.device) -> InvariantShapes:
    key = _cache_key(outline, device)
    if (kept := user_cache.read(KIND, key)) is not None:
        span, buckets = RowSpan(**kept["span"]), tuple(kept["query_buckets"])
        return InvariantShapes(**kept | {"span": span, "query_buckets": buckets})
    found = probe_shapes(outline, device)
    if found.found:
        user_cache.write(KIND, key, asdict(found))
    return found


def _cache_key(outline: Decoder, device: torch.device) -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "model": repr(outline.spec),
        "dtype": str(outline.dtype),
        "packed": unpacked_because(device, outline.dtype),
        "device": [device.type, *(_gpu(device) if device.type == "cuda" else describe_cpu())],
        "threads": torch.get_num_threads(),
        "torch": [torch.__version__, torch.__config__.show()],
        "settings": [
            _float32_precision(),
            torch.are_deterministic_algorithms_enabled(),
            backends.mkldnn.is_available() and backends.mkldnn.enabled,
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        ],
        "environment": sorted(
            f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES)
        ),
        "code": code_digest(),
    }


def _float32_precision() -> list[str]:
    """Return how PyTorch rounds in float32 products; the older setting cannot be read beside newer ones."""
    backends: Any = torch.backends
    places = backends, backends.cuda.matmul, backends.mkldnn.matmul
    newer = [getattr(place, "fp32_precision", "") for place in places]
    try:
        return [torch.get_float32_matmul_precision(), *newer]
    except RuntimeError:
        return newer


def _gpu(device: torch.device) -> list[str]:
    properties = torch.cuda.get_device_properties(device)
    cudnn: Any = torch.backends.cudnn
    capability = f"{properties.major}.{properties.minor}"
    versions = torch.version.cuda, cudnn.version()
    return [properties.name, capability, *map(str, (properties.multi_processor_count, *versions))]
