"""Policies that end a draft where the drafter's confidence is low.

Confidence is the raw probability of the drafter's likeliest token: softmax of its own logits, without
temperature or truncation. (At temperature 0 every distribution after the transforms is one-hot.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy.base import Policy
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.model.transfers import upload

__all__ = ["AdaptiveExit", "Confidence", "Fallback", "max_prob"]


def max_prob(q: Distribution, logits: Tensor) -> Tensor:
    """Return the likeliest token's probability [B] of logits [B, 1, V]; NaN where they are not finite.

    q: The distribution made of the logits; it knows which vocabulary operations serve.
    """
    return q.vocab_ops.max_prob(logits[:, 0])


@dataclass(frozen=True)
class Confidence(Policy):
    """Draft on while max_v q(v) >= threshold. The token after which the draft ends is kept and verified.

    The second exit of Kangaroo (Liu et al. 2024, arXiv 2404.18911; 0.6 there).
    `assistant_confidence_threshold` of `transformers` asks for the drawn token's probability instead, after
    the transforms.
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "confidence"

    stops_by_content = True

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold


@dataclass(frozen=True)
class Fallback(Policy):
    """Draft a token only where max_v q(v) >= threshold; the first place where it is not goes to the target.

    The fallback policy of Big Little Decoder (Kim et al. 2023, arXiv 2302.07863), whose code has 0.6 and 10
    tokens. It decides before the draw, so it is lossless; the lossy half is the acceptance rule `bild`.
    `Confidence` ends a draft *after* the unsure place, with a token there that the target checks.
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "fallback"

    stops_by_content = True

    def may_draw(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold


@dataclass(slots=True)
class _ExitState:
    threshold: float
    acceptance: float = 0.0  # AR of the paper


@dataclass(frozen=True)
class AdaptiveExit(Policy):
    """Draft on while max_v q(v) >= th, which moves towards a share of drafted tokens that are accepted.

    Draft & Verify (Zhang et al. 2023, arXiv 2309.08168). After a round in which m of n tokens were accepted:

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

    stops_by_content = True

    def start(self) -> _ExitState:
        return _ExitState(self.first)

    def go_on(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= upload([self._threshold(s) for s in sequences], logits.device)

    def _threshold(self, sequence: Sequence) -> float:
        """Return a row's threshold; rows of other policies have none, and their answers do not count."""
        state = sequence.policy_state
        return state.threshold if isinstance(state, _ExitState) else 0.0

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        if outcome.drafted == 0:
            return
        state: _ExitState = sequence.policy_state
        state.acceptance = (
            self.beta1 * state.acceptance + (1 - self.beta1) * outcome.accepted / outcome.drafted
        )
        if state.acceptance < self.target:
            moved = state.threshold + self.epsilon
        elif outcome.drafted >= self.max_draft:
            moved = state.threshold
        else:
            moved = state.threshold - self.epsilon
        moved = self.beta2 * state.threshold + (1 - self.beta2) * moved
        state.threshold = min(max(moved, 0.0), 1.0)
