"""Policies of the draft length alone."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.decode.policy.base import Policy
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["Fixed", "Heuristic"]


@dataclass(frozen=True)
class Fixed(Policy):
    """Always draft `max_draft` tokens (gamma of Leviathan et al. 2023, arXiv 2211.17192), with `siblings`."""

    max_draft: int
    siblings: int = 0
    name: str = "fixed"


@dataclass(frozen=True)
class Heuristic(Policy):
    """Draft two tokens more after a draft accepted whole, one fewer otherwise, from 1 to `max_draft`.

    The rule of `transformers`' assisted generation (num_assistant_tokens_schedule="heuristic_transient"),
    which begins at 20 tokens there, at 5 in older versions, and has no longest draft.
    """

    max_draft: int
    first: int = 5
    name: str = "heuristic"

    def start(self) -> list[int]:
        return [min(self.first, self.max_draft)]

    def budget(self, sequence: Sequence) -> int:
        return int(sequence.policy_state[0])

    def learn(self, sequence: Sequence, outcome: Round, confidence: float | None) -> None:
        if outcome.drafted == 0:
            return
        length = sequence.policy_state[0]
        whole = outcome.accepted == outcome.drafted
        sequence.policy_state[0] = min(length + 2, self.max_draft) if whole else max(length - 1, 1)
