"""Capacity: whether the weights fit, and how many rows of how many positions the caches get beside them.

Contract: decided before a weight is read, from the models' specs and from the free memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from foredraft.decode import accept
from foredraft.drafters.asset import Found
from foredraft.errors import ConfigError, Option, shortened
from foredraft.loading.machine_limits import free_memory
from foredraft.model.cache import KVCache
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.memory import as_gib, dtype_name
from foredraft.model.recurrent import snapshot_bytes
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.weights import weight_bytes

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


@dataclass(frozen=True, slots=True)
class CacheSize:
    rows: int  # of the target's cache
    positions: int  # of each row


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is loaded onto a device together, and how large its caches may be."""

    target: Checkpoint
    assets: Collection[Found]
    device: torch.device
    kernels: bool = True  # they may run the models
    reserved: int = 0  # bytes that the caller will take, such as a server for beginnings of prompts

    @property
    def models(self) -> list[Checkpoint]:
        return [self.target, *(model for found in self.assets for model in found.models)]

    def cache_size(self, limits: CacheLimits) -> CacheSize:
        """Return the size of the target's cache, so that all caches fit into free memory."""
        most = self.target.spec.max_positions
        if limits.max_length is not None and limits.max_length > most:
            raise ConfigError(
                f"but the model has {most} positions", option="max_length", value=limits.max_length,
                remedy=f"give {most} or less",
            )  # fmt: skip
        budget = self.cache_budget()
        positions = limits.max_length or self._positions(limits, budget)
        most_rows = _ROWS[self.device.type]
        if limits.rows_needed is not None:
            most_rows = min(most_rows, limits.rows_needed)
        rows = limits.max_batch or min(most_rows, budget // self.row_bytes(positions))
        taken = max(rows, 1) * self.row_bytes(positions)
        if rows < 1 or taken > budget:
            needed = shortened((taken + 2**19) // 2**20)  # rounded as a whole number: a float may not hold it
            raise ConfigError(
                f"{shortened(max(rows, 1))} sequences of {positions} positions need {needed} MiB of cache,"
                f" but {budget / 2**20:.0f} MiB may be used beside the weights",
                remedy=("lower ", Option("max_batch"), " or ", Option("max_length")),
            )
        return CacheSize(rows, positions)

    def longest_sequence(self) -> int:
        """Return the positions of the longest single sequence whose caches fit; 0 means that none fits."""
        fits = range(1, self.target.spec.max_positions + 1)
        return bisect_right(fits, self.cache_budget(), key=self.row_bytes)

    def cache_budget(self) -> int:
        """Return the bytes of all caches together; raise ConfigError where the weights do not fit."""
        free = self._free_bytes() - sum(found.bytes for found in self.assets)
        if self.device.type == "cuda":  # a CPU's memory has room for it in the half that the caches leave
            from foredraft.model.runner import graphs

            # CUDA graphs of the target, drafters' models and decisions keep memory for good
            owners = 2 + sum(bool(found.models or found.bytes) for found in self.assets)
            graph_bytes = graphs.KEPT_BYTES + (_LOGITS["cuda"] - 1) * accept.MOST_BYTES
            free -= self.reserved + owners * graph_bytes
        return int(max(0, free) * _SHARE[self.device.type])

    def row_bytes(self, positions: int) -> int:
        """Return the bytes of a row in all caches, the target's of so many positions, and in rounds."""
        target, kind = self.target, self.device.type
        logits = _LOGITS[kind] * _COLUMNS * target.spec.vocab_size * torch.float32.itemsize
        own = KVCache.bytes_per_row(target.spec, min(positions, target.spec.max_positions), target.dtype)
        states = 0
        if kind == "cuda":  # graphs keep memory for what a pass makes on its way through a layer
            for model in self.models:
                values = 4 * model.spec.hidden_size + 3 * model.spec.intermediate_size
                states += _PADDED_COLUMNS * values * model.dtype.itemsize
        # of the prompt's end, for samples that begin later
        snapshots = sum(snapshot_bytes(model.spec, model.dtype) for model in self.models)
        return own + logits + states + snapshots + sum(found.row_bytes(positions) for found in self.assets)

    def _positions(self, limits: CacheLimits, budget: int) -> int:
        """Return the positions of a row where the user does not give them: as many as fit."""

        def halved(positions: int, rows: int, fewest: int) -> int:
            while positions > fewest and rows * self.row_bytes(positions) > budget:
                positions = max(positions // 2, fewest)
            return positions

        most = self.target.spec.max_positions
        positions = min(most, limits.positions_needed or most)
        if limits.max_batch is None and limits.positions_needed is None:
            positions = halved(positions, _ENOUGH_ROWS, _ENOUGH_POSITIONS)
        return halved(positions, limits.max_batch or 1, _FEWEST_POSITIONS)

    def _free_bytes(self) -> int:
        """Return the free bytes that the weights leave; raise ConfigError where the weights do not fit."""
        models, device, free = self.models, self.device, free_memory(self.device)
        needs = _weight_needs(models, device, free, self.kernels)
        if sum(needs) <= free:
            return free - sum(needs)

        def fit(models: Sequence[Checkpoint], device: torch.device, free: int) -> bool:
            return sum(_weight_needs(models, device, free, self.kernels)) <= free

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
    served = kernels and unserved_because(model.spec, device, model.dtype) is None
    return _weights(model, device, native=served)


def _weights(model: Checkpoint, device: torch.device, *, native: bool) -> int:
    native = native and device.type == "cpu"
    return weight_bytes(model.spec, device, model.dtype, native=native, bits=model.bits)
