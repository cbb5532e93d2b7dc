"""A gate: no draft while the target is unsure of its own words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from foredraft.decode.policy.base import Policy, Signal
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round
from foredraft.decode.vocab_sums import log_softmax, softmax, sums

__all__ = ["TargetConfidence", "target_confidence"]


def target_confidence(logits: Tensor, tokens: Tensor, signal: Signal) -> Tensor:
    """Return the target's confidence in the tokens that it emitted, [B], from its raw softmax.

    Args:
        logits: [B, V] float32.
        tokens: [B], the emitted ones.
        signal: "probability" of the token; "margin" between the two likeliest tokens; "entropy", 1 - H / log
            V.
    """
    if signal == "entropy":
        logs = log_softmax(logits)
        return 1 + sums((logs.exp() * logs).nan_to_num(0.0)) / math.log(logits.shape[-1])
    probs = softmax(logits)
    if signal == "margin":
        first, second = probs.topk(2, -1).values.unbind(-1)
        return first - second
    return probs.gather(-1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class TargetConfidence(Policy):
    """Draft `max_draft` tokens unless the target's confidence in its last token was below `threshold`.

    The last token is the correction, the bonus or a plain step's. `by` names the measure of confidence. The
    gate is a function of the emitted text, so the output's distribution is the target's.
    """

    max_draft: int
    threshold: float = 0.5
    by: Signal = "probability"
    name: str = "target-confidence"

    @property
    def target_signal(self) -> Signal:  # type: ignore[override]
        return self.by

    def start(self) -> list[float]:
        return [math.inf]  # the target has emitted nothing yet

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft if sequence.policy_state[0] >= self.threshold else 0

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        assert confidence is not None
        sequence.policy_state[0] = confidence
