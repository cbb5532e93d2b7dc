"""Capacity: how many rows of how many positions the caches get, within free memory."""

from __future__ import annotations

import os

import torch

from foredraft.errors import ConfigError
from foredraft.model.cache import KVCache
from foredraft.model.runner import Runner

__all__ = ["DEVICES", "rows_and_positions"]

# Caches may take this share of what is free: the rest is for passes and other programs.
_SHARE = {"cpu": 0.5, "cuda": 0.8}
# Rows unless asked for: more seldom pay, and a new cache is written to, so its memory is taken at once.
_ROWS = {"cpu": 8, "cuda": 32}
# Long models give up positions down to this many so that so many rows fit,
_ENOUGH_ROWS, _ENOUGH_POSITIONS = 8, 4096
_FEWEST_POSITIONS = 512  # and down to this many so that anything does.
DEVICES = tuple(_SHARE)


def rows_and_positions(
    runners: list[Runner],
    device: torch.device,
    given: tuple[int | None, int | None],
    needed: tuple[int | None, int | None],
    stretch: int = 1,
) -> tuple[int, int]:
    """Rows and positions of the caches, within free memory; both arguments are pairs of these. stretch: of
    the draft's positions, which are its model's at most."""
    (max_batch, max_length), (rows_needed, positions_needed) = given, needed
    models = [(runner.decoder.spec, runner.decoder.dtype) for runner in runners]
    most = models[0][0].max_positions
    if max_length is not None and max_length > most:
        raise ConfigError(f"max_length is {max_length}; the model was trained for {most} positions")
    budget = int(free_memory(device) * _SHARE[device.type])

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
            f" {budget / 2**20:.0f} MiB may be used; lower max_batch or max_length"
        )
    return rows, positions


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
