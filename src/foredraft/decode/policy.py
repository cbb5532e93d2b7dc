"""Policies: whether to draft, when to stop, and what to learn from each round.

A policy never sees a token's own draw to drop it: it stops *after* a token, which is kept for
verification (dropping a drawn token because of its own probability biases the output).
State is one object per sequence, kept by the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foredraft.decode.law import Law
from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Round

__all__ = ["Fixed", "Heuristic", "Policy"]


class Policy(Protocol):
    """budget / go_on / learn."""

    @property
    def name(self) -> str: ...

    @property
    def looks(self) -> bool:
        """Whether `go_on` may ever stop a draft; if not, nobody has to ask it between two tokens."""
        ...

    def start(self) -> Any:
        """State of a new sequence."""
        ...

    def budget(self, sequence: Sequence) -> int:
        """Tokens to draft in this round at most; 0 = a plain step. The engine clips it to what fits."""
        ...

    def go_on(self, sequences: Seq[Sequence], position: int, q: Law) -> Tensor | None:
        """After the token at `position` of every draft was drawn from q [B, 1, V] (and kept): [B] bool,
        True = draft another. None = always, which spares the read of it on the host."""
        ...

    def learn(self, sequence: Sequence, outcome: Round) -> None: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always drafts `max_draft` tokens (gamma of Leviathan et al. 2023)."""

    max_draft: int
    name: str = "fixed"
    looks = False

    def start(self) -> None:
        return None

    def budget(self, sequence: Sequence) -> int:
        return self.max_draft

    def go_on(self, sequences: Seq[Sequence], position: int, q: Law) -> None:
        return None

    def learn(self, sequence: Sequence, outcome: Round) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Heuristic:
    """Two more after a draft accepted whole, one fewer otherwise, from 1 to `max_draft`.

    The rule of `transformers`' assisted generation (num_assistant_tokens_schedule="heuristic").
    """

    max_draft: int
    first: int = 5
    name: str = "heuristic"
    looks = False

    def start(self) -> list[int]:
        return [min(self.first, self.max_draft)]

    def budget(self, sequence: Sequence) -> int:
        return int(sequence.policy_state[0])

    def go_on(self, sequences: Seq[Sequence], position: int, q: Law) -> None:
        return None

    def learn(self, sequence: Sequence, outcome: Round) -> None:
        if outcome.drafted == 0:
            return
        length = sequence.policy_state[0]
        whole = outcome.accepted == outcome.drafted
        sequence.policy_state[0] = min(length + 2, self.max_draft) if whole else max(length - 1, 1)
