"""Policies: whether a row drafts, which drafter it uses, how far a draft goes, and what a round teaches."""

from foredraft.decode.policy.auto import Auto
from foredraft.decode.policy.base import (
    PLAIN,
    AdaptiveExit,
    ByRequest,
    Candidates,
    Confidence,
    Decision,
    Fallback,
    Fixed,
    Heuristic,
    Policy,
    Signal,
    TargetConfidence,
)
from foredraft.decode.policy.cost_table import CostTable

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
