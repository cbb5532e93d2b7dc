"""A pass and a fused draft: what a back end is asked to compute, and its result.

The call draws the tokens itself, by the noise that the draft loop would use, so it gives the same draft.

A `Pass` is on the host, but for its tokens and states, and complete. `native.NativeBackend` runs passes by
the project's C kernels; `torch_backend.TorchBackend` by PyTorch's operators, at batch-invariant shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.recurrent import Run
from foredraft.model.spec import Plan

CHUNK = 256  # positions of a prefill pass; prompts are cut at its multiples
MAX_QUERIES = 64  # columns per row of a verifying pass where any shape is allowed


class Captures:
    unsettled: ClassVar[int] = 0  # passes of this process that a CUDA graph may replay when they recur


class DrawnToken(Protocol):
    """A token of every row, and whatever its drawing gave besides: a tree of tensors."""

    @property
    def token(self) -> Tensor: ...  # [B, 1] int64
    @property
    def drawable(self) -> Tensor: ...  # [B, 1] bool, the logits are finite, and the token counts


class DraftSampler(Protocol):
    """Draws the tokens of a draft. A tree of tensors, which the draft loop makes."""

    @property
    def dense(self) -> bool: ...  # a drawn token keeps its distribution over the vocabulary
    def __call__(self, logits: Tensor, drawn: Tensor) -> DrawnToken:
        """Draw a token of every row from its logits [B, 1, V]; drawn: the tokens before it, [B, j]."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters and noise of a fused draft. None stands for a parameter that no row uses."""

    temperature: Tensor  # [B] float32
    top_k: Tensor | None  # [B] int64, 0 in rows without one
    top_p: Tensor | None  # [B] float32, 1 in rows without one
    min_p: Tensor | None  # [B] float32, 0 in rows without one
    cut: Tensor | None  # [B] bool, the rows that have a top_p or a min_p
    keys: Tensor  # [B, K] int64, the noise key of each draw

    def step(self, column: int) -> SamplingInputs:
        return replace(self, keys=self.keys[:, column : column + 1].contiguous())


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The draft vocabulary of a reduced head: some of the target's tokens."""

    tokens: Tensor  # the token of each output, [draft_vocab] int64
    vocabulary: int  # the number of all tokens


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of a fused draft: row b reads tokens[b] from starts[b] on, then drafts lengths[b] tokens."""

    tokens: Sequence[Sequence[int]]  # the tokens that each row reads first, [B] lists
    starts: Sequence[int]  # the position of the first of them, [B]
    lengths: Sequence[int]  # the tokens that each row drafts, [B]; 0: the row does nothing
    sampling: SamplingInputs | None = None  # sampling parameters and noise; None drafts greedily
    allowed: Sequence[Tensor | None] | None = None  # first tokens that each row may draw, [V] bool
    draws: DraftSampler | None = None  # for PyTorch's operators; the kernels draw by `sampling`
    draft_vocab: DraftVocab | None = None  # others' logits are -inf. None: the outputs are the tokens
    choices: Sequence[int] = ()  # of each step, as many runners-up are wanted, of the kernels alone

    @property
    def active(self) -> list[int]:
        return [row for row, length in enumerate(self.lengths) if length]


@dataclass(frozen=True, slots=True)
class FusedDraft:
    tokens: Tensor  # [B, K] int64; 0 past a row's draft, -1 where no allowed token has a finite logit
    finite: Tensor  # [B, K] bool, the logits are finite; False past a row's draft
    probs: Tensor | None  # [B, K, V] float32; None: the draft is greedy, or they are in `drawn`
    states: Tensor | None = None  # entering the exit layer, [B, K, D]; 0 past a row's draft
    drawn: tuple[Any, ...] | None = None  # what `draws` gave at each step; None where the kernels drew
    further: Tensor | None = None  # runners-up, [B, K, M] int64, -1 where there is none


# The leaves of each row's token tree, [B]: their columns, in order -> the column whose place each shares.
# By tree attention a leaf sees what is before its place, and itself; no other column sees it.
Leaves: TypeAlias = Sequence[Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Resume:
    """Hidden states of a verifying pass that a drafter has already computed."""

    depth: int  # the layer that the states enter. The pass runs the layers below it only for unknown columns
    hidden: Tensor  # the states, [B, T, D]; columns past `known` are ignored
    known: list[int]  # the leading columns of each row whose state is known, [B], 0 to T

    def fit(self, width: int) -> Resume:
        missing = width - self.hidden.shape[1]  # a negative number cuts
        return self if not missing else replace(self, hidden=F.pad(self.hidden, (0, 0, 0, missing)))


@dataclass(slots=True)
class Pass:
    """One pass: column t of row b is position starts[b] + t of the cache row first_row + b."""

    cache: CacheLayers  # the KV cache
    tokens: Tensor  # token ids, [B, T]
    starts: list[int]  # the position of each row's first column, [B]
    first_row: int  # the cache row of row 0
    active: list[int]  # the rows that are not idle
    real: list[range]  # the columns of each row that are computed, [B]; the others are padding
    plan: Plan  # the sub-layers that run
    start: int  # the first layer
    stop: int  # the layer after the last
    aux_layers: tuple[int, ...]  # the depths whose entering states are returned
    head: bool  # compute logits
    hidden: Tensor | None = None  # states that enter layer `start`, [B, T, D]; None embeds the tokens
    at: Tensor | None = None  # the column of each row whose logits are wanted, [B]; None wants all
    invariant: bool = True  # keep to batch-invariant shapes
    prefill: bool = False  # the pass reads a chunk of a prompt, which always has the same shape
    leaves: Leaves | None = None  # the leaves, behind all columns of `real`; None: there are none

    def leaves_of(self, row: int) -> Mapping[int, int]:
        return {} if self.leaves is None else self.leaves[row]

    def check(self, queries: int) -> int:
        cache, last = self.cache, max(self.starts[b] for b in self.active)
        if last + queries > cache.scratch:
            row = f"a cache row of {cache.positions} positions"
            raise ValueError(f"{queries} columns at position {last} overrun {row}")
        if queries > cache.slack:
            raise ValueError(f"{queries} columns exceed the cache's slack of {cache.slack} positions")
        return last

    def real_columns(self, queries: int) -> list[int]:
        """Return the indices of the real columns among [B, queries] columns, in row-major order."""
        return [
            b * queries + t for b, columns in enumerate(self.real) for t in (*columns, *self.leaves_of(b))
        ]

    def runs(self, queries: int, *, ragged: bool) -> tuple[Run, ...]:
        """Return the real columns of rows among all that are computed, for the recurrent layers that run."""
        found, before, own = list[Run](), 0, self.cache.recurring(self.plan, self.start, self.stop)
        for b, real in enumerate(self.real):
            # padding before the real columns is computed as they are, since its keys are written, too
            columns = real if ragged else range(real.stop)
            row, start, count = self.first_row + b, self.starts[b] + columns.start, len(columns)
            if count and own:
                reach = max([count, *(column + 1 - columns.start for column in self.leaves_of(b))])
                base = self.cache.begin(row, start, reach, own, certain=self.prefill)
                first = before if ragged else b * queries + columns.start
                found.append(Run(row, first, count, start, base))
            before += len(real)
        return tuple(found)

    def below(self, resume: Resume) -> Pass | None:
        """Return the pass below `resume.depth` over the columns of unknown state; None: all are known."""
        rows = zip(self.real, resume.known, strict=True)
        unknown = [range(max(real.start, known), real.stop) for real, known in rows]
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
            aux_layers=(),
            head=False,
            at=None,
            leaves=self.leaves
            and [{column - first: place - first for column, place in row.items()} for row in self.leaves],
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of a forward. Padding columns mean nothing, and are finite where the row's real ones are."""

    logits: Tensor | None  # [B, T, V] float32, or [B, 1, V] where `at` chose a column
    hidden: Tensor  # states that leave the last layer of the pass, [B, T, D]
    aux_states: dict[int, Tensor]  # by depth, the states that enter the layer, [B, T, D]
