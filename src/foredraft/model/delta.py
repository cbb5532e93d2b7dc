"""Gated delta nets (arXiv:2412.06464): the step of a position, and the gate of what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.recurrent import Recurrence

EPSILON = 1e-6  # of the length of queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Recurrence):
    decay: Tensor  # -exp(A), [value_heads] float32
    bias: Tensor  # of the rate a, [value_heads] float32
    output_norm: Tensor  # the weight of the norm of a head's output, [value_dim] float32
    eps: float  # of that norm

    def step(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        q, k, v = self.convolved_heads(window)
        b, a = torch.tensor_split(window[-1, sizes.channels :], 2)
        beta = torch.sigmoid(b).float()
        decay = torch.exp(self.decay * F.softplus(a.float() + self.bias))
        key, query = _unit(k)[:, None, :, None], (_unit(q) * sizes.key_dim**-0.5)[:, None, :, None]
        state = state * decay[:, None, None, None]
        change = (v.view(state.shape[0], state.shape[1], -1) - (state * key).sum(2)) * beta[:, None, None]
        state = state + key * change[:, :, None]
        return (state * query).sum(2).view(sizes.value_heads, sizes.value_dim), state

    def gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """Norm every head, and then gate it."""
        normed = F.rms_norm(read.float(), read.shape[1:], None, self.eps).to(read.dtype)
        normed = (normed.float() * self.output_norm).to(read.dtype)
        return (normed.float() * F.silu(gates.view_as(normed).float())).to(read.dtype).flatten()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
