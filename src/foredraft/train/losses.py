"""Losses between the target's distribution p and the drafter's q, by position, a few positions at a time.

The logits of 4,096 positions over 128,256 ids take 2.1 GB: so head, comparison and their backward pass run on
`CHUNK` positions, and only the gradients of what goes in are kept.

    ce           −Σ p log q                the reference's (Kangaroo, arXiv:2404.18911)
    kl           Σ p (log p − log q)       ce less p's entropy: the same gradient, and 0 where q is p
    reverse-kl   Σ q (log q − log p)       weighs the tokens that the drafter proposes
    tv           1 − Σ min(p, q)           1 − α, the probability of a rejection
    lk           λ kl + (1 − λ) tv         with λ = e^(−3 α); a loss of the project speculators (Apache-2.0)

A mixture is a sum with weights. A reduced head's sums run over its tokens, with p as it is: tv stays 1 − α.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # positions: few enough for a processor's caches, and enough that products are efficient
Rows = slice | Tensor  # some of the predictions
# (logits of predictions, which ones) -> float32 [2]: the loss, and a figure without gradient
Compare = Callable[[Tensor, Rows], Tensor]


def by_chunks(compare: Callable[[Tensor, slice], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the sum of `compare` over all chunks of x [M, hidden], [2]; its first value has a gradient."""
    found: Tensor = _ByChunks.apply(compare, x, *parameters)  # type: ignore[no-untyped-call]
    return found


class _ByChunks(torch.autograd.Function):
    """The gradients are computed with the loss, while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any, compare: Callable[[Tensor, slice], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        learned = [
            value for value, needed in zip(parameters, ctx.needs_input_grad[2:], strict=True) if needed
        ]
        sums = torch.zeros(2, device=x.device)
        of_x, of_learned = torch.zeros_like(x), [torch.zeros_like(value) for value in learned]
        for first in range(0, len(x), CHUNK):
            rows = slice(first, first + CHUNK)
            with torch.enable_grad():
                part = x[rows].detach().requires_grad_()
                own = compare(part, rows)
                of_x[rows], *gradients = torch.autograd.grad(own[0], [part, *learned])
            for sum_, gradient in zip(of_learned, gradients, strict=True):
                sum_ += gradient
            sums += own.detach()
        ctx.save_for_backward(of_x, *of_learned)
        return sums

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        scale = given[0][0]  # of the loss
        of_x, *of_learned = (gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors)
        rest = iter(of_learned)
        return None, of_x, *(next(rest) if needed else None for needed in ctx.needs_input_grad[2:])


Loss = Callable[[Tensor, Tensor], Tensor]  # (log p, log q), [M, V] each -> [M]
LK_SLOPE = 3.0  # of λ's exponent in α


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ min(p, q) by position, [M]: the probability that a drafted token is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the cross-entropy less the entropy of p."""
    finite = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # 0 log 0 is 0
    return cross_entropy(log_p, log_q) + (log_p.exp() * finite).sum(-1)


def likelihood_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return λ kl + (1 − λ) tv; λ is no variable of the gradient."""
    distance = 1 - overlap(log_p, log_q)
    weight = torch.exp(-LK_SLOPE * (1 - distance.detach()))
    return weight * forward_kl(log_p, log_q) + (1 - weight) * distance


FUNCTIONS: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "reverse-kl": lambda log_p, log_q: (log_q.exp() * (log_q - log_p)).sum(-1),
    "tv": lambda log_p, log_q: 1 - overlap(log_p, log_q),
    "lk": likelihood_kl,
}  # of the names in `options.LOSSES`


def mixture(weights: Mapping[str, float]) -> Loss:
    """Return the sum of losses with these weights."""

    def loss(log_p: Tensor, log_q: Tensor) -> Tensor:
        terms = [weight * FUNCTIONS[name](log_p, log_q) for name, weight in weights.items()]
        return torch.stack(terms).sum(0)

    return loss
