"""Mamba-2 (arXiv:2405.21060): the step of a position, and the gate of what it reads.

C, B and x are the queries, keys and values: a state fades, takes a key times a value that is scaled by the
length of the time step, and is read by a query. Prompts and single tokens are computed by this one function,
in float32. No time step is clamped (docs/losslessness.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.recurrent import Recurrence
from foredraft.model.recurrent_sizes import RecurrentSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Recurrence):
    decay: Tensor  # -exp(A), [value_heads] float32
    bias: Tensor  # of the time step, [value_heads] float32
    skip: Tensor  # D, the factor on a value itself, [value_heads] float32
    output_norm: Tensor  # the weight of the norm of a group's output, [values] float32
    eps: float  # of that norm

    def step(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.convolved_heads(window)
        time = F.softplus(window[-1, self.sizes.channels :].float() + self.bias)
        change = (v * time[:, None]).view(state.shape[0], state.shape[1], 1, -1)
        state = state * torch.exp(self.decay * time)[:, None, None, None] + k[:, None, :, None] * change
        return (state * q[:, None, :, None]).sum(2).view_as(v) + self.skip[:, None] * v, state

    def gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """Gate every value, and then norm those of each group of heads."""
        opened = (read.float().flatten() * F.silu(gates.float())).view(self.sizes.key_heads, -1)
        normed = F.rms_norm(opened, opened.shape[1:], None, self.eps).flatten()
        return (normed * self.output_norm).to(read.dtype)


def stored_order(sizes: RecurrentSizes) -> Tensor:
    """Return the rows of the projection, which stores the gates, x, B, C and the time steps."""
    parts = [sizes.values, sizes.values, sizes.keys, sizes.keys, sizes.rates]
    gates, x, b, c, time = torch.split_with_sizes(torch.arange(sum(parts)), parts)
    return torch.cat([c, b, x, time, gates])
