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
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import ConfigError

__all__ = ["LOSSES", "Loss", "overlap", "parse_loss"]

Loss = Callable[[Tensor, Tensor], Tensor]  # (log p, log q), [M, V] each -> [M]
LK_SLOPE = 3.0  # of λ's exponent in α


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ min(p, q) by position, [M]: the probability that a drafted token is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return −Σ p log q by position."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ p (log p − log q) by position."""
    p = log_p.exp()
    difference = torch.where(p > 0, log_p - log_q, 0.0)  # 0 log 0 is 0
    return (p * difference).sum(-1)


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


LOSSES: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "lk": likelihood_kl,
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """A weighted sum of losses."""

    weights: Mapping[str, float]

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        terms = [weight * LOSSES[name](log_p, log_q) for name, weight in self.weights.items()]
        return torch.stack(terms).sum(0)


def parse_loss(text: str) -> Loss:
    """Return the loss of a name, or of a mixture such as "ce=0.1,tv=0.9".

    Raises:
        ConfigError: The text names no loss.
    """
    if text in LOSSES:
        return LOSSES[text]
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if name not in LOSSES or not 0 < value < float("inf") or name in weights:
            remedy = f"give one of {', '.join(LOSSES)}, or a mixture such as ce=0.1,tv=0.9"
            raise ConfigError(option="loss", value=text, remedy=remedy)
        weights[name] = value
    return Mixture(weights)
