"""What a runner is asked for: one forward, checked against its cache and padded; a draft in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
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
class SamplingInputs:
    """How tokens are drawn from logits, a row of parameters each; None where nobody uses one."""

    temperature: Tensor  # [B] float32, as the others but for
    top_k: Tensor | None  # [B] int64
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]
    cut: Tensor | None  # [B] bool: rows with a top_p or a min_p
    keys: Tensor  # [B, K] int64: the noise of each draw


@dataclass(frozen=True, slots=True)
class StopThresholds:
    """Where drafts end by how sure their model is, a row each. float32, and as kernels read them: one after
    the other.

    Sure is the probability of the likeliest token, by softmax of the logits as they are. A place survives by
    the chance of its bin, times what the places before it do. Where that is below `keep`, no token is drawn;
    where it is below `more`, no step follows.
    """

    edges: Tensor  # [N - 1], rising, between the bins
    chances: Tensor  # [B, N]
    keep: Tensor  # [B, K]
    more: Tensor  # [B, K]

    def __post_init__(self) -> None:
        several = self.edges, self.chances, self.keep, self.more
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in several)
        assert self.chances.shape == (len(self.keep), len(self.edges) + 1)
        assert self.keep.shape == self.more.shape

    def survival(self, sure: Tensor, before: Tensor) -> Tensor:
        """Of the next place, all [B]; NaN where `sure` is."""
        bins = torch.bucketize(sure.contiguous(), self.edges, right=True)
        chance = self.chances.gather(1, bins[:, None])[:, 0]
        return (before * chance).where(sure == sure, sure)


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """Tokens that a model gave itself, one after the other; zeros past a row's own number."""

    tokens: Tensor  # [B, K] int64
    finite: Tensor  # [B, K] bool: the logits that each was drawn from
    probs: Tensor | None  # [B, K, V] float32: their laws; None: they are the likeliest
    counts: list[int]  # [B] tokens of each row
    steps: list[int]  # [B] that it took for them: one more where none was drawn of the last
    sure: Tensor | None = None  # [B, K] float32, of every step that was taken, else -1; None unless it stops


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
