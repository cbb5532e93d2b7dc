"""The gate: no draft while the target is unsure of what it says itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.policy.protocol import Alone, Signal
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["TargetConfidence", "certainty"]


def certainty(logits: Tensor, tokens: Tensor, signal: Signal) -> Tensor:
    """How sure logits [B, V] float32 are, by their softmax as it is; tokens [B]: those emitted -> [B].

    probability: of the token. margin: of the likeliest token, less the next one's. entropy: 1 - H / log V.
    """
    if signal == "entropy":
        logs = logits.log_softmax(-1)
        return 1 + (logs.exp() * logs).nan_to_num(0.0).sum(-1) / math.log(logits.shape[-1])
    probs = logits.softmax(-1)
    if signal == "margin":
        first, second = probs.topk(2, -1).values.unbind(-1)
        return first - second
    return probs.gather(-1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class TargetConfidence(Alone):
    """Plain steps while the target was less sure than `threshold` of the token that it gave last (the
    correction, the bonus or a plain step's), else drafts of `max_draft` tokens.

    by: what its being sure is measured by (`certainty`). A function of the text emitted, so the law is the
    target's.
    """

    max_draft: int
    threshold: float = 0.5
    by: Signal = "probability"
    name: str = "target-confidence"

    @property
    def wants(self) -> Signal:  # type: ignore[override]
        return self.by

    def start(self) -> list[float]:
        return [math.inf]  # it has said nothing yet

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft if sequence.policy_state[0] >= self.threshold else 0

    def learn(self, sequence: Sequence, outcome: Round, sure: float | None) -> None:
        assert sure is not None
        sequence.policy_state[0] = sure
