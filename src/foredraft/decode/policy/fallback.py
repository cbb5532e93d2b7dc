"""BiLD's fallback policy: where the drafter is unsure, the target speaks.

Kim et al. 2023, "Speculative Decoding with Big Little Decoder", arXiv 2302.07863. By itself it is as lossless
as any policy, since it decides before the draw; what is lossy there is the rule of acceptance, `bild`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.distribution import Distribution
from foredraft.decode.policy.protocol import Alone
from foredraft.decode.policy.thresholds import max_prob
from foredraft.decode.sequence import Sequence

__all__ = ["Fallback"]


@dataclass(frozen=True)
class Fallback(Alone):
    """Drafts a token only where max_v q(v) >= threshold, and hands over to the target at the first place
    where it is not, or after `max_draft` tokens. The published code has 0.6, and 10 tokens.

    `Confidence` ends a draft *after* the unsure place, with a token of it, which the target checks.
    """

    max_draft: int
    threshold: float = 0.6
    name: str = "fallback"

    looks = True

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft

    def draws(self, sequences: Seq[Sequence], position: int, q: Distribution, logits: Tensor) -> Tensor:
        return max_prob(q, logits) >= self.threshold
