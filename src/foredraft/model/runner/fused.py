"""A fused draft: all steps of a batch's draft in one call, and what it is given and gives.

The call draws the tokens itself, by the noise that the draft loop would use, so it gives the same draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

__all__ = ["DraftInputs", "DrawnToken", "Draws", "FusedDraft", "HeadWords", "SamplingInputs"]


class DrawnToken(Protocol):
    """A token of every row, and whatever its drawing gave besides: a tree of tensors."""

    @property
    def token(self) -> Tensor: ...  # [B, 1] int64

    @property
    def drawable(self) -> Tensor: ...  # [B, 1] bool, the logits are finite, and the token counts


class Draws(Protocol):
    """Draws the tokens of a draft. A tree of tensors, which the draft loop makes."""

    @property
    def dense(self) -> bool: ...  # a drawn token keeps its distribution over the vocabulary

    def __call__(self, logits: Tensor, drawn: Tensor) -> DrawnToken:
        """Draw a token of every row from its logits [B, 1, V]; drawn: the tokens before it, [B, j]."""
        ...


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
class HeadWords:
    """The words of a reduced head, which are some of the tokens.

    Attributes:
        tokens: The token of each output, [words] int64.
        vocabulary: The number of all tokens.
    """

    tokens: Tensor
    vocabulary: int


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of a fused draft: row b reads tokens[b] from starts[b] on, then drafts lengths[b] tokens.

    Attributes:
        tokens: The tokens that each row reads first, [B] lists.
        starts: The position of the first of them, [B].
        lengths: The tokens that each row drafts, [B]; 0: the row does nothing.
        sampling: Sampling parameters and noise; None drafts greedily.
        allowed: The tokens that each row's first step may draw, [B] of [V] bool; None allows all.
        draws: Draws the tokens where PyTorch's operators run the steps; the kernels draw by `sampling`.
        words: Those of a reduced head; every other token's logit is -inf. None: its outputs are the tokens.
        choices: How many tokens are wanted that come next in the draw of each step, from the first one on;
            the kernels alone give them.
    """

    tokens: Sequence[Sequence[int]]
    starts: Sequence[int]
    lengths: Sequence[int]
    sampling: SamplingInputs | None = None
    allowed: Sequence[Tensor | None] | None = None
    draws: Draws | None = None
    words: HeadWords | None = None
    choices: Sequence[int] = ()

    @property
    def active(self) -> list[int]:
        """The rows that draft."""
        return [row for row, length in enumerate(self.lengths) if length]


@dataclass(frozen=True, slots=True)
class FusedDraft:
    """The draft of a batch whose steps all ran in one call.

    Attributes:
        tokens: The drafted tokens, [B, K] int64; 0 past a row's draft length. -1 where no allowed token has a
            finite logit.
        finite: Whether the logits of each token are finite, [B, K] bool; False past a row's draft length.
        probs: The distribution of each token, [B, K, V] float32; None: the draft is greedy, or they are in
            `drawn`.
        states: The states after which each token was drawn, entering the tapped layer, [B, K, D]; 0 past a
            row's draft length. None: no layer was tapped.
        drawn: What `draws` gave at each step; None where the kernels drew.
        further: The tokens that come next in the draw of each one, [B, K, M] int64, -1 where there is none;
            None: unwanted, or not known.
    """

    tokens: Tensor
    finite: Tensor
    probs: Tensor | None
    states: Tensor | None = None
    drawn: tuple[Any, ...] | None = None
    further: Tensor | None = None
