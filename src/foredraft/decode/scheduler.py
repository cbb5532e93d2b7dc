"""Scheduler: which sequences are in the batch. Admission, chunked prefill, succession, cancellation.

First come, first served. A row of the cache is room for `max_length` positions, so admission by memory
is admission by rows; a request that can never fit is refused when it is submitted. Siblings (samples of
one prompt) come in waves: the first is prefilled, the others copy its rows or take a finished one's over.
"""

from __future__ import annotations

import contextlib
from collections import deque

from foredraft.decode.rows import Rows
from foredraft.decode.sequence import Finish, Sequence, State

__all__ = ["Scheduler"]


class Scheduler:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.waiting: deque[Sequence] = deque()

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def steady(self) -> bool:
        """Return whether every row decodes and no sequence waits."""
        sequences = self.rows.sequences
        return not self.waiting and bool(sequences) and all(s.state is State.RUNNING for s in sequences)

    @property
    def running(self) -> bool:
        return any(s.state is State.RUNNING for s in self.rows.sequences)

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.rows.sequences and not self.waiting

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences; return siblings that are ready to run at once."""
        ready: list[Sequence] = []
        while self.waiting and len(self.rows.sequences) < self.rows.capacity:
            sequence = self.waiting[0]
            donor = self._donor(sequence)
            if donor is not None and donor.state is State.PREFILLING:
                break  # its prompt is on the way
            self.waiting.popleft()
            self.rows.add(sequence, donor)
            if donor is None and len(sequence.prompt) > 1:
                sequence.state = State.PREFILLING
            else:
                sequence.state = State.RUNNING
                ready.append(sequence)
        return ready

    @property
    def prefilling(self) -> Sequence | None:
        """Return the sequence whose prompt is read next: the first one in prefill; None without any."""
        reading = (s for s in self.rows.sequences if s.state is State.PREFILLING)
        return min(reading, key=lambda s: s.id, default=None)

    def leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Sequence | None:
        """End a sequence; return the sibling that took its row over, ready to run, if one did."""
        if sequence.state is State.FINISHED:
            return None
        sequence.finish, sequence.error = finish, error
        state, sequence.state = sequence.state, State.FINISHED
        if state is State.WAITING:
            with contextlib.suppress(ValueError):  # it was never submitted
                self.waiting.remove(sequence)
            return None
        if state is State.RUNNING and sequence.cache_finite and self.waiting:
            sibling = self.waiting[0]
            if sibling.group is not None and sibling.group == sequence.group:
                self.waiting.popleft()
                self.rows.succeed(sequence, sibling)
                sibling.state = State.RUNNING
                return sibling
        self.rows.remove(sequence)
        return None

    def _donor(self, sequence: Sequence) -> Sequence | None:
        if sequence.group is None:
            return None
        return next((s for s in self.rows.sequences if s.group == sequence.group), None)
