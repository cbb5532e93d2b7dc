"""What makes the slots of a block follow each other: DSpark's bias, DFlash 2's selector and convolutions.

Sources: https://github.com/deepseek-ai/DeepSpec, deepspec/modeling/dspark/markov_head.py, and
https://github.com/z-lab/dflash, dflash/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.drafters.heads.layers import HeadBuilder
from foredraft.drafters.heads.record import BlockRecord
from foredraft.drafters.heads.tensors import CODEBOOKS, CONVOLVED, JOINTS, SELECTOR
from foredraft.model.layers import Product


@dataclass(frozen=True, slots=True)
class Markov:
    """The bias that the token before a slot adds to the slot's logits."""

    form: str  # one of `MARKOV_FORMS`
    embedding: Tensor  # of the token before, [V, r]
    output: Product  # from r to the head's draft vocabulary
    joint: Product | None = None  # the gate, or the cell of the recurrent form; None in the plain form

    @classmethod
    def of(cls, builder: HeadBuilder, form: str, prefix: str) -> Self:
        embedding = builder.load([f"{prefix}markov_w1.weight"])
        output = builder.linear(f"{prefix}markov_w2")
        return cls(
            form, embedding, output, builder.linear(f"{prefix}{JOINTS[form][0]}") if form in JOINTS else None
        )

    def __call__(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, draft_vocab] of a slot behind the tokens `before` [B], and the next state."""
        inner = F.embedding(before, self.embedding)
        if self.form == "gated":
            assert self.joint is not None
            inner = self.joint(torch.cat([hidden, inner], -1)).sigmoid() * inner
        elif self.form == "rnn":
            inner, state = self._cell(inner, hidden, state)
        return logits + self.output(inner).float(), state

    def _cell(self, inner: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.joint is not None
        state = torch.zeros_like(inner) if state is None else state
        gate, new, inner = self.joint(torch.cat([state, inner, hidden], -1)).chunk(3, -1)
        return inner.tanh(), torch.lerp(new.tanh(), state, gate.sigmoid())

    def after(self, before: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the state after a slot that does not draft; arguments as the call's."""
        inner = F.embedding(before, self.embedding)
        return self._cell(inner, hidden, None)[1] if self.form == "rnn" else None


@dataclass(frozen=True, slots=True)
class Selector:
    """The choice among the likeliest tokens of a slot, by how well each follows the token before.

    Other tokens cannot be drafted.
    """

    candidates: int  # tokens of a slot
    predecessors: Tensor  # of the token before, [V, r]
    successors: Tensor  # of the candidates, [V, r]
    hidden: Product  # from the states of slots to r

    @classmethod
    def of(cls, builder: HeadBuilder, candidates: int) -> Self:
        predecessors, successors = (
            builder.load([name if name in builder.shapes else f"{name}.weight"]) for name in CODEBOOKS
        )
        return cls(candidates, predecessors, successors, builder.linear(f"{SELECTOR}.hidden_projection"))

    def __call__(
        self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, V] of a slot behind `before` [B]; arguments as those of `Markov`."""
        likeliest, ids = logits.topk(min(self.candidates, logits.shape[-1]), -1)  # [B, K] each
        context = F.embedding(before, self.predecessors) * self.hidden(hidden)
        follows = (context[:, None] * F.embedding(ids, self.successors)).sum(-1)
        return torch.full_like(logits, -math.inf).scatter(-1, ids, likeliest + follows.float()), state


def transition_of(builder: HeadBuilder, record: BlockRecord) -> Markov | Selector | None:
    if record.selector_rank:
        return Selector.of(builder, record.candidates)
    return None if record.markov is None else Markov.of(builder, record.markov, record.markov_prefix)


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolutions along a block of what enters a sub-layer and of what leaves it.

    Each channel has kernels of its own, to which the input adds one for each group of channels.
    """

    kernels: Tensor  # of the two, [2, taps, d]
    further: Product  # from the input to what it adds, 2 * taps * groups

    @classmethod
    def of(cls, builder: HeadBuilder, name: str) -> Self:
        return cls(builder.load([f"{name}.base_kernel"]), builder.linear(f"{name}.kernel_projection"))

    def __call__(self, x: Tensor, block: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the convolved input [N, d] of whole blocks, and what convolves the sub-layer's output."""
        _, taps, size = self.kernels.shape
        added = self.further(x).view(-1, block, 2, taps, self.further.shape[0] // (2 * taps), 1)
        # [blocks, block, 2, taps, groups, channels of a group]
        kernels = self.kernels.view(2, taps, added.shape[4], -1) + added

        def convolve(which: int, y: Tensor) -> Tensor:
            parts = y.view(-1, block, *kernels.shape[4:])
            total = torch.zeros_like(parts)
            for tap in range(taps):
                total = total + kernels[:, :, which, tap] * F.pad(parts, (0, 0, 0, 0, tap, 0))[:, :block]
            return total.view(-1, size)

        return convolve(0, x), lambda y: convolve(1, y)


def convolutions_of(builder: HeadBuilder, record: BlockRecord) -> tuple[tuple[Convolution, Convolution], ...]:
    if not record.conv_taps:
        return ()
    attention, mlp = CONVOLVED
    return tuple(
        (Convolution.of(builder, f"{name}.{attention}"), Convolution.of(builder, f"{name}.{mlp}"))
        for name in map(record.layer_name, range(record.spec.layers))
    )
