"""Losses between the target's distribution p and the drafter's q, by position.

    ce           −Σ p log q                the reference's (Kangaroo, arXiv:2404.18911)
    kl           Σ p (log p − log q)       ce less p's entropy: the same gradient, and 0 where q is p
    reverse-kl   Σ q (log q − log p)       weighs the tokens that the drafter proposes
    tv           1 − Σ min(p, q)           1 − α, the probability of a rejection
    lk           λ kl + (1 − λ) tv         with λ = e^(−3 α): kl while q is far from p, tv once it is near

A mixture is a sum with weights. A reduced head has a q for some tokens alone; the sums then run over these,
with p as it is, so tv stays 1 − α. lk is a loss of the project speculators (Apache-2.0). What the losses have
in common, and what they gave, is in docs/guides/train.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "Loss", "mixture", "overlap"]

Loss = Callable[[Tensor, Tensor], Tensor]  # (log p, log q), [M, V] each -> [M]
LK_SLOPE = 3.0  # of λ's exponent in α


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ min(p, q) by position, [M]: the probability that a drafted token is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return −Σ p log q by position."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ p (log p − log q) by position: the cross-entropy less the entropy of p."""
    finite = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # 0 log 0 is 0
    return cross_entropy(log_p, log_q) + (log_p.exp() * finite).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ q (log q − log p) by position."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 − Σ min(p, q) by position."""
    return 1 - overlap(log_p, log_q)


def likelihood_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return λ kl + (1 − λ) tv by position; λ is no variable of the gradient."""
    distance = total_variation(log_p, log_q)
    weight = torch.exp(-LK_SLOPE * (1 - distance.detach()))
    return weight * forward_kl(log_p, log_q) + (1 - weight) * distance


FUNCTIONS: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "lk": likelihood_kl,
}  # of the names in `options.LOSSES`


def mixture(weights: Mapping[str, float]) -> Loss:
    """Return the sum of losses with these weights."""

    def loss(log_p: Tensor, log_q: Tensor) -> Tensor:
        terms = [weight * FUNCTIONS[name](log_p, log_q) for name, weight in weights.items()]
        return torch.stack(terms).sum(0)

    return loss
