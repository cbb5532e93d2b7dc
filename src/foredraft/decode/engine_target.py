"""Target: the interface of the model whose output counts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.runner import Forward, Leaves, Resume

__all__ = ["Target"]


class Target(Protocol):
    """The part of `model.runner.Runner` that the engine uses."""

    max_queries: int  # longest [pending, *draft] that one pass takes
    chunk: int  # prefill is cut at multiples of it

    @property
    def by_kernels(self) -> bool: ...  # whether the C kernels run its passes, with threads of their own

    @property
    def takes_leaves(self) -> bool: ...  # whether a pass may have them

    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        starts: list[int],
        *,
        idle: Seq[bool] | None = None,
        counts: list[int] | None = None,
        resume: Resume | None = None,
        taps: Seq[int] = (),
        leaves: Leaves | None = None,
    ) -> Forward: ...

    def prefill(
        self, cache: KVCache, row: int, tokens: list[int], start: int, *, taps: Seq[int] = ()
    ) -> Forward: ...

    def head(self, hidden: Tensor) -> Tensor: ...
