"""The arguments of a forward, resolved and checked, and the arguments and results of a fused draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.decoder import Plan
from foredraft.model.runner.passes import PassShape
from foredraft.model.runner.shapes import ExactShapes


@dataclass(frozen=True, slots=True)
class Resume:
    """Hidden states of a verifying pass that a drafter has already computed.

    Attributes:
        depth: The layer that the states enter. The pass runs the layers below it only for unknown columns.
        hidden: The states, [B, T, D]; columns past `known` are ignored.
        known: The leading columns of each row whose state is known, [B], 0 to T.
    """

    depth: int
    hidden: Tensor
    known: list[int]

    def fit(self, width: int) -> Resume:
        """Return the same for a pass of `width` columns per row."""
        missing = width - self.hidden.shape[1]  # a negative number cuts
        return self if not missing else replace(self, hidden=F.pad(self.hidden, (0, 0, 0, missing)))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters and noise of a fused draft. None stands for a parameter that no row uses.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64, 0 in rows without one.
        top_p: [B] float32, 1 in rows without one.
        min_p: [B] float32, 0 in rows without one.
        cut: [B] bool, the rows that have a top_p or a min_p.
        keys: [B, K] int64, the noise key of each draw.
    """

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    cut: Tensor | None
    keys: Tensor

    def step(self, column: int) -> SamplingInputs:
        """Return the inputs of one draw of each row."""
        return replace(self, keys=self.keys[:, column : column + 1].contiguous())


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """The draft of a batch whose steps all ran in one call.

    Attributes:
        tokens: The drafted tokens, [B, K] int64; 0 past a row's draft length. -1 where no allowed token has a
            finite logit.
        finite: Whether the logits of each token are finite, [B, K] bool; False past a row's draft length.
        probs: The distribution of each token, [B, K, V] float32; None: the draft is greedy.
        states: The states after which each token was drawn, entering the tapped layer, [B, K, D]; 0 past a
            row's draft length. None: no layer was tapped.
    """

    tokens: Tensor
    finite: Tensor
    probs: Tensor | None
    states: Tensor | None = None


@dataclass(slots=True)
class Job:
    """The resolved arguments of one forward.

    Attributes:
        cache: The KV cache.
        shapes: The shapes that the pass may have.
        tokens: Token ids, [B, T].
        starts: The position of each row's first column, [B].
        first_row: The cache row of row 0.
        active: The rows that are not idle.
        real: The columns of each row that are computed, [B]; the others are padding.
        plan: The sub-layers that run.
        stop: The layer after the last.
        taps: The depths whose entering states are returned.
        head: Compute logits.
        capturable: The pass may be captured and replayed as a CUDA graph.
    """

    cache: CacheLayers
    shapes: ExactShapes
    tokens: Tensor
    starts: list[int]
    first_row: int
    active: list[int]
    real: list[range]
    plan: Plan
    stop: int
    taps: tuple[int, ...]
    head: bool
    capturable: bool

    def check(self, queries: int) -> int:
        """Check that `queries` columns per row fit into the cache, and return the largest start of a row.

        Raises:
            ValueError: The columns pass the end of a cache row, or its slack.
        """
        cache, last = self.cache, max(self.starts[b] for b in self.active)
        if last + queries > cache.scratch:
            raise ValueError(
                f"{queries} columns at position {last} overrun a cache row of {cache.positions} positions"
            )
        if queries > cache.slack:
            raise ValueError(f"{queries} columns exceed the cache's slack of {cache.slack} positions")
        return last

    def shape(self) -> PassShape:
        """Return the shape of the pass: queries and attended length padded to the job's shapes.

        Raises:
            ValueError: The padded columns do not fit into the cache.
        """
        shapes, (batch, width) = self.shapes, self.tokens.shape
        queries = shapes.queries(width, batch)
        length = min(shapes.length(self.check(queries) + width), self.cache.stored)
        return PassShape(self.first_row, batch, queries, length, shapes.span, shapes.apart)

    def real_columns(self, queries: int) -> list[int]:
        """Return the indices of the real columns among [B, queries] columns, in row-major order."""
        return [b * queries + t for b, columns in enumerate(self.real) for t in columns]

    def unknown(self, resume: Resume) -> Job | None:
        """Return the pass below `resume.depth` over the columns of unknown state; None: all are known."""
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
