"""One forward that was asked for: what it is over, checked against its cache, and padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.decoder import Plan
from foredraft.model.runner.passes import PassShape
from foredraft.model.runner.shapes import ExactShapes


@dataclass(frozen=True, slots=True)
class Resume:
    """What a drafter already computed of a verifying pass: states entering layer `depth`."""

    depth: int
    hidden: Tensor  # [B, T, D]
    known: list[int]  # [B] leading columns whose state is known, 0 to T


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of one forward, resolved."""

    cache: KVCache
    shapes: ExactShapes
    tokens: Tensor  # [B, T]
    starts: list[int]
    first_row: int
    active: list[int]
    real: list[range]  # of each row, the columns that somebody wants
    plan: Plan
    stop: int
    taps: tuple[int, ...]
    head: bool
    recorded: bool  # may be replayed from a recording

    def shape(self) -> PassShape:
        """Padded, and within the cache."""
        cache, shapes, (batch, width) = self.cache, self.shapes, self.tokens.shape
        queries = shapes.queries(width, batch)
        last = max(self.starts[b] for b in self.active)
        if last + queries > cache.scratch:
            raise ValueError(
                f"{queries} columns at position {last} overrun a cache row of {cache.positions} positions"
            )
        if queries > cache.slack:
            raise ValueError(f"{queries} columns are more than the slack of {cache.slack} positions holds")
        length = min(shapes.length(last + width), cache.stored)
        return PassShape(self.first_row, batch, queries, length, shapes.span, shapes.apart)

    def unknown(self, resume: Resume) -> Job | None:
        """The pass below `resume.depth` over the columns whose state is not known; None: all are."""
        unknown = [
            range(max(real.start, known), real.stop)
            for real, known in zip(self.real, resume.known, strict=True)
        ]
        first = min((columns.start for columns in unknown if columns), default=None)
        if first is None:
            return None
        return replace(
            self,
            tokens=self.tokens[:, first:],
            starts=[start + first for start in self.starts],
            real=[range(columns.start - first, columns.stop - first) for columns in unknown],
            stop=resume.depth,
            taps=(),
            head=False,
        )
