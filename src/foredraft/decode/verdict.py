"""Verdict: the decision of an acceptance rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's decision: accepted [B], drafted tokens to keep; next_token [B], correction or bonus."""

    accepted: Tensor
    next_token: Tensor
