"""What a runner is asked for: one forward, checked against its cache and padded; a draft in one call."""

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
class Drawing:
    """How tokens are drawn from logits, a row of parameters each; None where nobody uses one."""

    temperature: Tensor  # [B] float32, as the others but for
    top_k: Tensor | None  # [B] int64
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]
    cut: Tensor | None  # [B] bool: rows with a top_p or a min_p
    keys: Tensor  # [B, K] int64: the noise of each draw


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that a model gave itself, one after the other; zeros past a row's own number."""

    tokens: Tensor  # [B, K] int64
    finite: Tensor  # [B, K] bool: the logits that each was drawn from
    probs: Tensor | None  # [B, K, V] float32: their laws; None: they are the likeliest


@dataclass(slots=True)
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

    def check(self, queries: int) -> int:
        """The last position that a row starts from; so many columns of each fit into the cache."""
        cache, last = self.cache, max(self.starts[b] for b in self.active)
        if last + queries > cache.scratch:
            raise ValueError(
                f"{queries} columns at position {last} overrun a cache row of {cache.positions} positions"
            )
        if queries > cache.slack:
            raise ValueError(f"{queries} columns are more than the slack of {cache.slack} positions holds")
        return last

    def shape(self) -> PassShape:
        """Padded, and within the cache."""
        shapes, (batch, width) = self.shapes, self.tokens.shape
        queries = shapes.queries(width, batch)
        length = min(shapes.length(self.check(queries) + width), self.cache.stored)
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
