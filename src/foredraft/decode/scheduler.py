"""Scheduler: which sequences are in the batch. Admission, chunked prefill, succession, cancellation.

First come, first served. A row of the cache is room for `max_length` positions, so admission by memory
is admission by rows; a request that can never fit is refused when it is submitted. Siblings (samples of
one prompt) come in waves: the first is prefilled, the others copy its rows or take a finished one's over.

A paused sequence takes no part in rounds and gets no row. Where another sequence waits for a row, it is
*parked*: its row's content moves to host memory, and it waits at the head of the queue until it is resumed.
At most as many sequences are parked as there are rows, so their memory is at most another cache.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable

from foredraft.decode.rows import Rows
from foredraft.decode.sequence import Finish, Sequence, State
from foredraft.model.cache import KVCache

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
        return not self.waiting and bool(sequences) and all(s.active for s in sequences)

    @property
    def running(self) -> bool:
        return any(s.active for s in self.rows.sequences)

    @property
    def idle(self) -> bool:
        """Return whether there is no sequence."""
        return not self.rows.sequences and not self.waiting

    @property
    def stalled(self) -> bool:
        """Return whether a step would do nothing until a sequence is resumed, submitted or cancelled."""
        goes_on = self.running or self.prefilling is not None
        return not goes_on and (self._next is None or (self._full and self.to_park is None))

    @property
    def to_park(self) -> Sequence | None:
        """Return the paused sequence whose row another one needs; None where there is no such."""
        if self._next is None or not self._full:
            return None
        others = [s for s in self.waiting if s is not self._next]  # the next one gets a row for it
        if sum(s.parked is not None for s in others) >= self.rows.capacity:
            return None
        return next((s for s in self.rows.sequences if s.state is State.RUNNING and not s.active), None)

    def park(self, sequence: Sequence, caches: Iterable[KVCache]) -> None:
        """Let a paused sequence wait without a row; these caches hold its text."""
        self.rows.park(sequence, caches)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences; return those that are ready to run at once."""
        ready: list[Sequence] = []
        while not self._full and (sequence := self._next) is not None:
            donor = self._donor(sequence)
            if donor is not None and donor.state is State.PREFILLING and sequence.parked is None:
                break  # its prompt is on the way
            self.waiting.remove(sequence)
            if sequence.parked is not None:
                self.rows.unpark(sequence)
                sequence.state = State.RUNNING
                ready.append(sequence)
                continue
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
        sequence.parked = None
        if state is State.WAITING:
            with contextlib.suppress(ValueError):  # it was never submitted
                self.waiting.remove(sequence)
            return None
        if state is State.RUNNING and sequence.cache_finite and self.waiting:
            sibling = self._next
            if sibling is not None and sibling.parked is None and sibling.group == sequence.group is not None:
                self.waiting.remove(sibling)
                self.rows.succeed(sequence, sibling)
                sibling.state = State.RUNNING
                return sibling
        self.rows.remove(sequence)
        return None

    @property
    def _next(self) -> Sequence | None:
        """Return the sequence that gets the next free row."""
        return next((s for s in self.waiting if s.paused_at is None), None)

    @property
    def _full(self) -> bool:
        return len(self.rows.sequences) == self.rows.capacity

    def _donor(self, sequence: Sequence) -> Sequence | None:
        if sequence.group is None:
            return None
        return next((s for s in self.rows.sequences if s.group == sequence.group), None)
