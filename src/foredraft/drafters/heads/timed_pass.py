"""The pass of a head's draft over contexts that mean nothing, to be timed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foredraft.decode.drafter import DraftPass
from foredraft.model.cache import CacheLayers, KVCache
from foredraft.model.forward_context import rope_tables
from foredraft.model.rope import Rope
from foredraft.model.spec import ModelSpec

__all__ = ["TimedPass"]


@dataclass(frozen=True, slots=True)
class TimedPass(DraftPass):
    """A pass that has a cache of its own.

    Attributes:
        scratch: That cache and its rotary tables, by the rows and the positions that are timed.
    """

    scratch: dict[tuple[int, int], tuple[KVCache, dict[Rope, Tensor]]] = field(
        default_factory=dict, kw_only=True, repr=False
    )

    def scratch_of(
        self, cache: CacheLayers, spec: ModelSpec, *, blocked: bool = False
    ) -> tuple[KVCache, dict[Rope, Tensor]]:
        """Return a cache beside the given one, and its rotary tables; the last ones are kept."""
        key = cache.rows, cache.positions
        if key not in self.scratch:
            self.scratch.clear()
            made = cache.beside(spec, blocked=blocked)
            self.scratch[key] = made, rope_tables(spec, made.stored, made.device, made.dtype)
        return self.scratch[key]
