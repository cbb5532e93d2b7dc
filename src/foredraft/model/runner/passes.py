"""A pass: what a back end is asked to compute, and its result.

Contract: a `Pass` is on the host, but for its tokens and states, and is complete: all that a back end needs
besides the weights. Both back ends (`backend`) give the real columns of a pass the same meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.plan import Plan

__all__ = ["Forward", "Leaves", "Pass", "Resume"]

# The leaves of each row, [B]: their columns, in order -> the column whose place each shares. A leaf is
# another token in that place. It sees what is before the place, and itself; no other column sees it.
Leaves: TypeAlias = Sequence[Mapping[int, int]]


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


@dataclass(slots=True)
class Pass:
    """One pass: column t of row b is position starts[b] + t of the cache row first_row + b.

    A leaf has the position of the place that it shares. Its key and value lie where its own column is.

    Attributes:
        cache: The KV cache.
        tokens: Token ids, [B, T].
        starts: The position of each row's first column, [B].
        first_row: The cache row of row 0.
        active: The rows that are not idle.
        real: The columns of each row that are computed, [B]; the others are padding.
        plan: The sub-layers that run.
        start: The first layer.
        stop: The layer after the last.
        taps: The depths whose entering states are returned.
        head: Compute logits.
        hidden: States that enter layer `start`, [B, T, D]; None embeds the tokens.
        at: The column of each row whose logits are wanted, [B]; None wants all.
        invariant: Keep to batch-invariant shapes.
        prefill: The pass reads a chunk of a prompt, which always has the same shape.
        leaves: The leaves, behind all columns of `real`; None: there are none.
    """

    cache: CacheLayers
    tokens: Tensor
    starts: list[int]
    first_row: int
    active: list[int]
    real: list[range]
    plan: Plan
    start: int
    stop: int
    taps: tuple[int, ...]
    head: bool
    hidden: Tensor | None = None
    at: Tensor | None = None
    invariant: bool = True
    prefill: bool = False
    leaves: Leaves | None = None

    def leaves_of(self, row: int) -> Mapping[int, int]:
        """Return the leaves of a row of the pass: column -> the column whose place it shares."""
        return {} if self.leaves is None else self.leaves[row]

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

    def real_columns(self, queries: int) -> list[int]:
        """Return the indices of the real columns among [B, queries] columns, in row-major order."""
        return [
            b * queries + t for b, columns in enumerate(self.real) for t in (*columns, *self.leaves_of(b))
        ]

    def below(self, resume: Resume) -> Pass | None:
        """Return the pass below `resume.depth` over the columns of unknown state; None: all are known."""
        unknown = [
            range(max(real.start, known), real.stop)
            for real, known in zip(self.real, resume.known, strict=True)
        ]
        starts = [columns.start for columns in unknown if columns]
        starts += [column for row in self.leaves or () for column in row]
        if not starts:
            return None
        first = min(starts)
        return replace(
            self,
            tokens=self.tokens[:, first:],
            starts=[start + first for start in self.starts],
            real=[range(columns.start - first, columns.stop - first) for columns in unknown],
            stop=resume.depth,
            taps=(),
            head=False,
            at=None,
            leaves=self.leaves
            and [{column - first: place - first for column, place in row.items()} for row in self.leaves],
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of a forward. Padding columns mean nothing, and are finite where the row's real ones are.

    Attributes:
        logits: [B, T, V] float32, or [B, 1, V] where `at` chose a column; None where no logits were wanted.
        hidden: States that leave the last layer of the pass, [B, T, D].
        taps: By depth, the states that enter the layer, [B, T, D].
    """

    logits: Tensor | None
    hidden: Tensor
    taps: dict[int, Tensor]
