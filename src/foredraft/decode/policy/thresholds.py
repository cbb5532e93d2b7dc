"""Policies that stop a draft where the drafter is unsure.

How sure it is, is the raw probability of its likeliest token: softmax of its own logits, without temperature
or cuts. At temperature 0 the law after the transforms is one-hot and says nothing. The token after which a
draft stops is kept and verified.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy.protocol import Alone
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.device import upload

__all__ = ["AdaptiveExit", "Confidence", "max_prob"]


def max_prob(q: Distribution, logits: Tensor) -> Tensor:
    """The likeliest token's probability [B], of logits [B, 1, V]; NaN where they are not finite. q: the law
    that was made of them."""
    return q.vocab_ops.max_prob(logits[:, 0])


@dataclass(frozen=True)
class Confidence(Alone):
    """Drafts on while max_v q(v) >= threshold.

    The second exit of Kangaroo (Liu et al. 2024, arXiv 2404.18911; 0.6 there). What `transformers` has as
    assistant_confidence_threshold asks for the drawn token's probability instead, after the transforms.
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "confidence"

    looks = True

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold


@dataclass(slots=True)
class _Exit:
    threshold: float
    matched: float = 0.0


@dataclass(frozen=True)
class AdaptiveExit(Alone):
    """Drafts on while max_v q(v) >= th, which moves towards a share of drafted tokens that are accepted.

    Draft & Verify (Zhang et al. 2024, arXiv 2309.08168). After a round in which m of n tokens were kept:

        AR  <- beta1 AR + (1 - beta1) m / n
        th' <- th + epsilon where AR < target; th where n is the longest draft; else th - epsilon
        th  <- beta2 th + (1 - beta2) th'

    beginning with AR = 0 and th = `first`; th stays within 0 and 1.
    """

    max_draft: int
    target: float = 0.9
    first: float = 0.6
    epsilon: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    name: str = "adaptive-exit"

    looks = True

    def start(self) -> _Exit:
        return _Exit(self.first)

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= upload([s.policy_state.threshold for s in sequences], logits.device)

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        if outcome.drafted == 0:
            return
        state: _Exit = sequence.policy_state
        state.matched = self.beta1 * state.matched + (1 - self.beta1) * outcome.accepted / outcome.drafted
        if state.matched < self.target:
            moved = state.threshold + self.epsilon
        elif outcome.drafted >= self.max_draft:
            moved = state.threshold
        else:
            moved = state.threshold - self.epsilon
        moved = self.beta2 * state.threshold + (1 - self.beta2) * moved
        state.threshold = min(max(moved, 0.0), 1.0)
