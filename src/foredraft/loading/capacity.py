"""Capacity: whether the weights fit, and how many rows of how many positions the caches get beside them.

Contract: decided before a weight is read, from the models' specs and from the free memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from foredraft.decode import accept
from foredraft.drafters.asset import Found
from foredraft.errors import ConfigError, Option, shortened
from foredraft.loading.machine_limits import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import as_gib, dtype_name
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.weights import expanded_bytes, weight_bytes

_SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the memory beside the weights; the rest is for activations
_ROWS = {"cpu": 8, "cuda": 32}  # at most by default: a new cache is zeroed, which takes its memory at once
# Float32 tensors of the logits' size that a sampled round holds at once, at most: the logits, and what the
# transforms, the residual and the draw make of them by PyTorch's operators. On a CPU the kernels make none.
_LOGITS = {"cpu": 0, "cuda": 11}
_COLUMNS = 9  # of a verifying pass, as most policies draft
_PADDED_COLUMNS = 16  # that so many are padded to
# Models with many positions give up positions, down to this many, until this many rows fit.
_ENOUGH_ROWS, _ENOUGH_POSITIONS = 8, 4096
_FEWEST_POSITIONS = 512  # to which they are halved until one row fits
DEVICES = tuple(_SHARE)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bounds of the caches besides memory; None is no bound."""

    max_batch: int | None = None  # rows that the user asks for
    max_length: int | None = None  # positions that the user asks for
    rows_needed: int | None = None  # rows that the requests to come use at most
    positions_needed: int | None = None  # positions that the requests to come use at most
    reserved: int = 0  # bytes that the caller will take, such as a server for beginnings of prompts


@dataclass(frozen=True, slots=True)
class CacheSize:
    rows: int  # of the target's cache
    positions: int  # of each row


def cache_size(
    target: Checkpoint,
    assets: Collection[Found],
    device: torch.device,
    limits: CacheLimits,
    *,
    kernels: bool = True,
) -> CacheSize:
    """Return the size of the target's cache, so that all caches fit into free memory."""
    most = target.spec.max_positions
    if limits.max_length is not None and limits.max_length > most:
        raise ConfigError(
            f"but the model has {most} positions", option="max_length", value=limits.max_length,
            remedy=f"give {most} or less",
        )  # fmt: skip
    budget = _cache_budget(target, assets, device, kernels, limits.reserved)
    row_bytes = partial(_row_bytes, target, assets, device)
    positions = limits.max_length or _positions(limits, most, budget, row_bytes)
    most_rows = _ROWS[device.type]
    if limits.rows_needed is not None:
        most_rows = min(most_rows, limits.rows_needed)
    rows = limits.max_batch or min(most_rows, budget // row_bytes(positions))
    taken = max(rows, 1) * row_bytes(positions)
    if rows < 1 or taken > budget:
        needed = shortened((taken + 2**19) // 2**20)  # rounded as a whole number: a float may not hold it
        raise ConfigError(
            f"{shortened(max(rows, 1))} sequences of {positions} positions need {needed} MiB of cache, but"
            f" {budget / 2**20:.0f} MiB may be used beside the weights",
            remedy=("lower ", Option("max_batch"), " or ", Option("max_length")),
        )
    return CacheSize(rows, positions)


def longest_sequence(
    target: Checkpoint, assets: Collection[Found], device: torch.device, *, kernels: bool = True
) -> int:
    """Return the positions of the longest single sequence whose caches fit; 0 means that none fits."""
    budget = _cache_budget(target, assets, device, kernels)
    fits = range(1, target.spec.max_positions + 1)
    return bisect_right(fits, budget, key=partial(_row_bytes, target, assets, device))


def _cache_budget(
    target: Checkpoint, assets: Collection[Found], device: torch.device, kernels: bool, reserved: int = 0
) -> int:
    """Return the bytes that all caches together may take; raise ConfigError where the weights do not fit."""
    models = [target, *(model for found in assets for model in found.models)]
    free = _free_bytes(models, device, kernels) - sum(found.bytes for found in assets)
    if device.type == "cuda":  # a CPU's memory has room for it in the half that the caches leave
        from foredraft.model.runner import graphs

        # CUDA graphs of the target, drafters' models and decisions keep memory for good
        owners = 2 + sum(bool(found.models or found.bytes) for found in assets)
        graph_bytes = graphs.KEPT_BYTES + (_LOGITS["cuda"] - 1) * accept.MOST_BYTES
        free -= reserved + owners * graph_bytes
    return int(max(0, free) * _SHARE[device.type])


def _row_bytes(target: Checkpoint, assets: Collection[Found], device: torch.device, positions: int) -> int:
    """Return the bytes that a row takes: in all caches, the target's of so many positions, and in rounds."""
    logits = _LOGITS[device.type] * _COLUMNS * target.spec.vocab_size * torch.float32.itemsize
    own = KVCache.bytes_per_row(target.spec, min(positions, target.spec.max_positions), target.dtype)
    states = 0
    if device.type == "cuda":  # graphs keep memory for what a pass makes on its way through a layer
        for model in [target, *(model for found in assets for model in found.models)]:
            values = 4 * model.spec.hidden_size + 3 * model.spec.intermediate_size
            states += _PADDED_COLUMNS * values * model.dtype.itemsize
    return own + logits + states + sum(found.row_bytes(positions) for found in assets)


def _positions(limits: CacheLimits, most: int, budget: int, row_bytes: Callable[[int], int]) -> int:
    """Return the positions of a row where the user does not give them: as many as fit."""

    def halved(positions: int, rows: int, fewest: int) -> int:
        while positions > fewest and rows * row_bytes(positions) > budget:
            positions = max(positions // 2, fewest)
        return positions

    positions = min(most, limits.positions_needed or most)
    if limits.max_batch is None and limits.positions_needed is None:
        positions = halved(positions, _ENOUGH_ROWS, _ENOUGH_POSITIONS)
    return halved(positions, limits.max_batch or 1, _FEWEST_POSITIONS)


def _free_bytes(models: Sequence[Checkpoint], device: torch.device, kernels: bool) -> int:
    """Return the free bytes that the weights leave; raise ConfigError where the weights do not fit."""
    free = free_memory(device)
    needs = _weight_needs(models, device, free, kernels)
    if sum(needs) <= free:
        return free - sum(needs)

    def fit(models: Sequence[Checkpoint], device: torch.device, free: int) -> bool:
        return sum(_weight_needs(models, device, free, kernels)) <= free

    remedies: list[tuple[str | Option, ...]] = []
    halves = [replace(model, dtype=torch.bfloat16) for model in models]
    if any(model.dtype == torch.float32 for model in models) and fit(halves, device, free):
        remedies.append(("give ", Option("dtype", "bfloat16")))
    other = torch.device("cpu" if device.type == "cuda" else "cuda")
    present = other.type == "cpu" or torch.cuda.is_available()
    if present and fit(models, other, free_memory(other)):
        remedies.append(("give ", Option("device", str(other))))
    if len(models) > 1 and fit(models[:1], device, free):
        remedies.append(("leave the draft model out",))
    first, *others = remedies or [("give a smaller model",)]
    sizes = (
        f"{as_gib(size)} in {dtype_name(model.dtype)}" for size, model in zip(needs, models, strict=True)
    )
    raise ConfigError(
        f"the weights need {', those of the draft model '.join(sizes)}, but {as_gib(free)} are free on"
        f" {device}",
        remedy=(*first, *(part for remedy in others for part in (", or ", *remedy))),
    )


def _weight_needs(models: Sequence[Checkpoint], device: torch.device, free: int, kernels: bool) -> list[int]:
    """Return the bytes of each model's weights on the device.

    Whether the kernels run a model is asked only where the smaller layout fits: the self-check itself takes
    memory.
    """
    least = [min(_weights(model, device, native=native) for native in {kernels, False}) for model in models]
    return least if sum(least) > free else [weight_memory(model, device, kernels) for model in models]


def weight_memory(model: Checkpoint, device: torch.device, kernels: bool = True) -> int:
    """Return the bytes of a model's weights in the layout that they get on the device."""
    return _weights(model, device, native=kernels and _by_kernels(model, device))


def expanded_memory(model: Checkpoint, device: torch.device) -> dict[str, int]:
    """Return the bytes of a model's expanded weights on the device by their formats."""
    if model.spec.quantisation is None:
        return {}
    return expanded_bytes(model.spec, device, model.dtype, native=_by_kernels(model, device))


def _by_kernels(model: Checkpoint, device: torch.device) -> bool:
    return unserved_because(model.spec, device, model.dtype) is None


def _weights(model: Checkpoint, device: torch.device, *, native: bool) -> int:
    native = native and device.type == "cpu"
    return weight_bytes(model.spec, device, model.dtype, native=native, bits=model.bits)
