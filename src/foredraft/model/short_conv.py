"""Short convolutions of LFM 2 (https://huggingface.co/LiquidAI/LFM2-1.2B): the log alone, without a state.

What is convolved is the product of two projections; a third one gates the result. All of it is in the dtype
of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.layers import RowSpan, product
from foredraft.model.recurrent import Recurrence
from foredraft.model.recurrent_sizes import RecurrentSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(Recurrence):
    def project(self, x: Tensor, span: RowSpan | None) -> tuple[Tensor, Tensor]:
        normed = x if self.norm is None else self.norm(x)
        factor, values, gates = product(self.qkv, normed, span).chunk(3, 1)
        return factor * values, gates

    def step(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.convolved(window), state

    def gated(self, read: Tensor, gates: Tensor) -> Tensor:
        return read * gates


def stored_order(sizes: RecurrentSizes) -> Tensor:
    """Return the rows of the projection: two factors of what is convolved, and gates, stored between."""
    factor, gates, values = torch.arange(3 * sizes.values).chunk(3)
    return torch.cat([factor, values, gates])
