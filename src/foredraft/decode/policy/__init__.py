"""Policies: whether a row drafts, which drafter it uses, how far a draft goes, and what a round teaches."""

from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.base import PLAIN, Candidates, Decision, Policy, Signal
from foredraft.decode.policy.by_request import ByRequest
from foredraft.decode.policy.cost_table import CostTable
from foredraft.decode.policy.lengths import Fixed, Heuristic
from foredraft.decode.policy.target_confidence import TargetConfidence
from foredraft.decode.policy.thresholds import AdaptiveExit, Confidence, Fallback

__all__ = [
    "PLAIN",
    "AdaptiveExit",
    "Auto",
    "ByRequest",
    "Candidates",
    "Confidence",
    "CostTable",
    "Decision",
    "Fallback",
    "Fixed",
    "Heuristic",
    "Policy",
    "Signal",
    "TargetConfidence",
]
