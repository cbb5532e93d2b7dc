"""Sequence: one request's (or one sample's) life, from its ids to its finish reason.

All state here is host state and changes at commit only. `len(tokens) - 1` positions are in the
target's cache before each round: the last token is pending (no first-token special case).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foredraft.decode.constraint import Constraint
from foredraft.decode.noise import seed_key
from foredraft.decode.sampling import SamplingParams
from foredraft.decode.stats import Round

__all__ = ["Finish", "Origin", "Sequence", "State"]


class State(StrEnum):
    WAITING = "waiting"  # no row yet
    PREFILLING = "prefilling"  # has a row; its prompt is being read
    RUNNING = "running"  # in the round
    FINISHED = "finished"


class Finish(StrEnum):
    EOS = "eos"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Origin(StrEnum):
    """Who wrote a token."""

    DRAFTER = "drafter"  # drafted and accepted
    TARGET = "target"  # a plain step, or the correction after a rejection
    BONUS = "bonus"  # the target's token after a draft that was accepted whole


@dataclass(eq=False, slots=True)
class Sequence:
    """prompt: ids; eos: ids that end it; drafter: name, or None to decode plainly."""

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    sample: int = 0
    eos: frozenset[int] = frozenset()
    drafter: str | None = None
    constraint: Constraint | None = None
    group: int | None = None  # sequences of one group share a prompt and may copy its cache rows

    tokens: list[int] = field(default_factory=list)  # prompt and new ids
    origins: list[Origin] = field(default_factory=list)  # of the new ids
    state: State = State.WAITING
    finish: Finish | None = None
    error: str | None = None
    row: int = -1  # owned by rows.py
    rounds: list[Round] = field(default_factory=list)
    round_count: int = 0  # part of the noise key; never goes back
    attempts: dict[int, int] = field(default_factory=dict)  # position -> rollbacks of a ban that crossed it
    proven: bool = False  # its cache rows hold finite values only: its last round showed it
    wary: bool = False  # its last draft led to values that are not finite: the next step is plain
    drafter_faults: int = 0  # rounds in which its drafter's logits were not finite
    policy_state: Any = None  # the policy's, opaque to everyone else
    started: float = 0.0  # seconds of a monotonic clock: its first round, and its end
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def key(self) -> int:
        return seed_key(self.seed, self.sample)

    @property
    def new_ids(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_new_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def settled(self) -> int:
        """New tokens that no rollback can take back: what a stream may show."""
        if self.constraint is None or self.state is State.FINISHED:
            return len(self.tokens) - len(self.prompt)
        return self.constraint.settled()

    def extend(self, tokens: list[int], origins: list[Origin]) -> int:
        """Append up to the first EOS, limit or ban's rollback; returns how many of `tokens` were read.

        The sequence may end up *shorter* than before: a constraint may take back earlier tokens.
        """
        for count, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            self.tokens.append(token)
            self.origins.append(origin)
            if self.constraint is not None:
                kept = self.constraint.advance(token)
                if kept < len(self.tokens) - len(self.prompt):
                    self.constraint.roll_back(kept)
                    self._roll_back(kept)
                    return count
            if token in self.eos and not self.params.ignore_eos:
                self.finish = Finish.EOS
                return count
            if self.remaining == 0:
                self.finish = Finish.LENGTH
                return count
        return len(tokens)

    def _roll_back(self, kept: int) -> None:
        """Back to `kept` new tokens; the noise of every position crossed is never used again."""
        length = len(self.prompt) + kept
        for position in range(length, len(self.tokens)):
            self.attempts[position] = self.attempts.get(position, 0) + 1
        del self.tokens[length:]
        del self.origins[kept:]
