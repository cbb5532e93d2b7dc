"""Waiting states: those of committed positions that a drafter has not read yet; its next draft reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.sequence import Sequence

__all__ = ["MAX_WAITING", "Waiting", "WaitingStates"]

MAX_WAITING = 128  # states of a row that wait for a draft: bounds their memory, and one pass reads them


@dataclass(slots=True)
class WaitingStates:
    """The states of one sequence that wait.

    Attributes:
        sequence: The sequence.
        start: The first position.
        states: [n, D]; several taps of a position lie side by side.
    """

    sequence: Sequence
    start: int
    states: Tensor

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.states)

    @property
    def due(self) -> bool:
        """Whether they wait no longer: they are of a prompt that goes on, or as many as may wait."""
        return self.stop < len(self.sequence.prompt) or len(self.states) >= MAX_WAITING


class Waiting:
    """The waiting states of all sequences of a drafter."""

    def __init__(self) -> None:
        self._by_id: dict[int, WaitingStates] = {}

    def add(self, sequence: Sequence, start: int, states: Tensor) -> WaitingStates:
        """Add states from position `start` on, which replace what is there; return all of the sequence."""
        waiting = self._by_id.get(sequence.id)
        if waiting is None:
            waiting = self._by_id[sequence.id] = WaitingStates(sequence, start, states)
        else:
            waiting.states = torch.cat([waiting.states[: start - waiting.start], states])
        return waiting

    def of(self, sequence: Sequence) -> list[WaitingStates]:
        """Return the states of a sequence: one entry, or none."""
        waiting = self._by_id.get(sequence.id)
        return [] if waiting is None else [waiting]

    def where(self, chosen: Callable[[Sequence], bool]) -> list[WaitingStates]:
        """Return the states of each chosen sequence."""
        return [waiting for waiting in self._by_id.values() if chosen(waiting.sequence)]

    def rewind(self, sequence: Sequence, stop: int) -> None:
        """Drop those of a sequence from position `stop` on: a ban took back their tokens."""
        waiting = self._by_id.get(sequence.id)
        if waiting is not None and waiting.stop > stop:
            waiting.states = waiting.states[: max(0, stop - waiting.start)]
            if not len(waiting.states):
                self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Drop all of a sequence; it may have none."""
        self._by_id.pop(sequence.id, None)
