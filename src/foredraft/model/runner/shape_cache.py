"""What the self-check found, kept between runs in the user's cache folder.

Contract: only what probing finds is kept, for it depends on shapes, machine and code alone, and all of these
are in the key. The confirmation on the model's own layers also depends on their weights; it is short, and
runs at every load. Nothing about the folder is ever an error: what cannot be read, or is not what it should
be, is probed for again, and what cannot be written is not kept. What found no agreement is not kept either.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from foredraft.kernels.machine import cache_folder, describe_cpu
from foredraft.model import attention, layers
from foredraft.model.decoder import Decoder
from foredraft.model.runner import packed, probes, shapes
from foredraft.model.runner.packed import packs
from foredraft.model.runner.shapes import ExactShapes

logger = logging.getLogger(__name__)

CODE = (attention, layers, packed, probes, shapes)  # what probes and what is probed
# variables by which the libraries underneath choose their kernels
KERNELS = ("ATEN_", "CUBLAS", "CUDNN", "DNNL_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "TORCH_")


def cached_shapes(
    outline: Decoder, device: torch.device, probe: Callable[[Decoder, torch.device], ExactShapes]
) -> ExactShapes:
    """What `probe` finds, or found here before under the same circumstances."""
    folder = cache_folder()
    if folder is None:
        return probe(outline, device)
    key = _circumstances(outline, device)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = folder / "shapes" / f"{digest[:32]}.json"
    if (kept := _read(path, key)) is not None:
        return kept
    found = probe(outline, device)
    if found.found:
        _write(path, {"key": key, "shapes": asdict(found)})
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


def _read(path: Path, key: dict[str, Any]) -> ExactShapes | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] != key:
            return None
        found = ExactShapes(**kept["shapes"] | {"query_buckets": tuple(kept["shapes"]["query_buckets"])})
        return found if _sensible(found) else None
    except (OSError, ValueError, KeyError, TypeError):
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


def _write(path: Path, kept: dict[str, Any]) -> None:
    """Beside, then renamed: whoever reads sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as beside:
            json.dump(kept, beside)
        try:
            os.replace(beside.name, path)
        except OSError:
            os.unlink(beside.name)
            raise
    except OSError as error:
        logger.debug("the self-check's findings are not kept: %s", error)
