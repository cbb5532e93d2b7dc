"""Capacity: whether the weights fit, and how many rows of how many positions the caches get beside them.

Contract: decided before a weight is read, from the models' specs and what is free then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.errors import ConfigError
from foredraft.loading.memory import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.device import dtype_name
from foredraft.model.runner.native import unserved_because
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes

__all__ = ["DEVICES", "rows_and_positions"]

Models = Sequence[tuple[ModelSpec, torch.dtype]]  # the target, and the draft where there is one

# Caches may take this share of what the weights leave free: the rest is for passes and other programs.
_SHARE = {"cpu": 0.5, "cuda": 0.8}
# Rows unless asked for: more seldom pay, and a new cache is written to, so its memory is taken at once.
_ROWS = {"cpu": 8, "cuda": 32}
# Long models give up positions down to this many so that so many rows fit,
_ENOUGH_ROWS, _ENOUGH_POSITIONS = 8, 4096
_FEWEST_POSITIONS = 512  # and down to this many so that anything does.
DEVICES = tuple(_SHARE)


def rows_and_positions(
    models: Models,
    device: torch.device,
    given: tuple[int | None, int | None],
    needed: tuple[int | None, int | None],
    stretch: int = 1,
    kernels: bool = True,
) -> tuple[int, int]:
    """Rows and positions of the caches, within free memory; both arguments are pairs of these. stretch: of
    the draft's positions, which are its model's at most. kernels: they may run the models.

    Raises ConfigError where the weights do not fit, or no cache does beside them.
    """
    (max_batch, max_length), (rows_needed, positions_needed) = given, needed
    most = models[0][0].max_positions
    if max_length is not None and max_length > most:
        raise ConfigError(f"max_length is {max_length}; the model was trained for {most} positions")
    budget = int(_left_by_weights(models, device, kernels) * _SHARE[device.type])

    def bytes_of(positions: int) -> int:
        lengths = (positions, stretch * positions)
        return sum(
            KVCache.bytes_per_row(spec, min(length, spec.max_positions), dtype)
            for (spec, dtype), length in zip(models, lengths, strict=False)
        )

    def shrunk(positions: int, rows: int, fewest: int) -> int:
        while positions > fewest and rows * bytes_of(positions) > budget:
            positions = max(positions // 2, fewest)
        return positions

    positions = max_length or min(most, positions_needed or most)
    if max_length is None:
        if max_batch is None and positions_needed is None:
            positions = shrunk(positions, _ENOUGH_ROWS, _ENOUGH_POSITIONS)
        positions = shrunk(positions, max_batch or 1, _FEWEST_POSITIONS)
    most_rows = _ROWS[device.type] if rows_needed is None else min(_ROWS[device.type], rows_needed)
    rows = max_batch or min(most_rows, budget // bytes_of(positions))
    taken = max(rows, 1) * bytes_of(positions)
    if rows < 1 or taken > budget:
        raise ConfigError(
            f"{max(rows, 1)} sequences of {positions} positions need {taken / 2**20:.0f} MiB of cache, but"
            f" {budget / 2**20:.0f} MiB may be used beside the weights; lower max_batch or max_length"
        )
    return rows, positions


def _left_by_weights(models: Models, device: torch.device, kernels: bool) -> int:
    """What is free beside the weights; ConfigError where they do not fit."""
    free = free_memory(device)
    needs = [_bytes(model, device, kernels) for model in models]
    if sum(needs) <= free:
        return free - sum(needs)
    sizes = [f"{_gib(need)} in {dtype_name(dtype)}" for need, (_, dtype) in zip(needs, models, strict=True)]
    raise ConfigError(
        f"the weights need {', those of the draft '.join(sizes)}, but {_gib(free)} are free on {device};"
        f" {_remedy(models, device, free, kernels)}"
    )


def _remedy(models: Models, device: torch.device, free: int, kernels: bool) -> str:
    """What would fit, of what the user can change."""

    def fit(models: Models, device: torch.device, free: int) -> bool:
        return sum(_bytes(model, device, kernels) for model in models) <= free

    ways = []
    halves = [(spec, torch.bfloat16) for spec, _ in models]
    if any(dtype == torch.float32 for _, dtype in models) and fit(halves, device, free):
        ways.append("give dtype='bfloat16'")
    other = torch.device("cpu" if device.type == "cuda" else "cuda")
    there = other.type == "cpu" or torch.cuda.is_available()
    if there and fit(models, other, free_memory(other)):
        ways.append(f"give device='{other}'")
    if len(models) > 1 and fit(models[:1], device, free):
        ways.append("leave the draft out")
    return ", or ".join(ways) or "give a smaller model"


def _bytes(model: tuple[ModelSpec, torch.dtype], device: torch.device, kernels: bool) -> int:
    """Of a model's weights, as they will be laid out there."""
    spec, dtype = model
    native = kernels and unserved_because(spec, device, dtype) is None
    return weight_bytes(spec, device, dtype, native=native)


def _gib(size: int) -> str:
    return f"{size / 2**30:.{1 if size >= 2**30 else 3}f} GiB"
