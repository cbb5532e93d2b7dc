"""Policies: whether to draft and who, when to stop, and what to learn from each round.

Contract: a policy decides from distributions and from what was emitted. It never sees a drawn token to drop
it: it stops *after* a token, which is kept for verification (dropping a drawn token because of its own
probability biases the output). So no policy can change the law of the text.
"""

from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.fallback import Fallback
from foredraft.decode.policy.gate import TargetConfidence
from foredraft.decode.policy.lengths import Fixed, Heuristic
from foredraft.decode.policy.protocol import PLAIN, Alone, Choice, Offers, Policy, Signal
from foredraft.decode.policy.thresholds import AdaptiveExit, Confidence

__all__ = [
    "PLAIN",
    "AdaptiveExit",
    "Alone",
    "Auto",
    "Choice",
    "Confidence",
    "CostTable",
    "Fallback",
    "Fixed",
    "Heuristic",
    "Offers",
    "Policy",
    "Signal",
    "TargetConfidence",
]
