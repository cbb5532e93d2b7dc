"""Scheduler: which sequences are in the batch, and which prompt is read next.

Two things are given out: rows of the cache, each with room for `max_length` positions, and passes over a
chunk of a prompt, one a step. A request that can never fit is refused when it is submitted. The rule:

- **Rows** go to the client with the fewest rows, and among equals to the one that has had the fewest tokens
  (`Shares`). Within a client they go first come, first served; a client that is alone gets all of them. Where
  all rows are taken and a client that waits has at least two rows fewer than another one, the latest sequence
  of the client with the most rows gives its row up, and goes on later. Its text is the same.
- **Chunks** go to the prompt with the fewest unread tokens, so that a short prompt passes long ones, and
  equal prompts are read one after the other. What its client has used more than others counts as unread
  tokens, too, up to a doubling.
- **Nothing starves.** One chunk in `TURNS` goes to the prompt that came first. So a prompt of c chunks is
  read within TURNS × (c + chunks of older prompts with a row) passes while it has a row, however many short
  ones come. A client that waits falls behind the clock of `Shares`, so that its turn comes before that of
  clients that come fresh.

Siblings (samples of one prompt) come in waves: the first is prefilled, the others copy its rows or take a
finished one's over.

A paused sequence takes no part in rounds and gets no row. Where another sequence waits for a row, it is
*parked*, as is one that gives its row up: its row's content moves to host memory, and it waits at the head of
its client's queue. At most as many sequences are parked as there are rows, so their memory is at most another
cache.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain

from foredraft.decode.rows import Rows
from foredraft.decode.sequence import Finish, Sequence, State
from foredraft.decode.shares import Shares
from foredraft.model.cache import KVCache

__all__ = ["Scheduler"]

# Of so many chunks, one goes to the prompt that came first. Short prompts lose one pass in so many to a long
# one, which takes at most so many times as long (benchmarks/notes/batches.md).
TURNS = 4


class Scheduler:
    """Gives out the rows, and chooses which prompt is read next.

    Attributes:
        shares: What each client has used.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.shares = Shares()
        self._queues: dict[str, deque[Sequence]] = {}  # by client; none is empty
        self._parked: set[Sequence] = set()
        self._read = 0  # chunks so far

    def submit(self, sequence: Sequence) -> None:
        if not self._competing():
            self.shares.restart()
        self._queues.setdefault(sequence.client, deque()).append(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        """Return the sequences without a row, by client, each client's in order."""
        return list(chain.from_iterable(tuple(self._queues.values())))

    @property
    def steady(self) -> bool:
        """Return whether every row decodes and no sequence waits."""
        sequences = self.rows.sequences
        return not self._queues and bool(sequences) and all(s.active for s in sequences)

    @property
    def running(self) -> bool:
        return any(s.active for s in self.rows.sequences)

    @property
    def idle(self) -> bool:
        """Return whether there is no sequence."""
        return not self.rows.sequences and not self._queues

    @property
    def stalled(self) -> bool:
        """Return whether a step would do nothing until a sequence is resumed, submitted or cancelled."""
        goes_on = self.running or self.prefilling is not None
        return not goes_on and (self._next is None or (self._full and self.to_park is None))

    @property
    def to_park(self) -> Sequence | None:
        """Return the sequence that gives its row up for another one; None where there is no such."""
        if not self._full or (following := self._next) is None:
            return None
        if len(self._parked - {following}) >= self.rows.capacity:  # the next one gets a row for it
            return None
        rows = self.rows.sequences
        paused = next((s for s in rows if s.state is State.RUNNING and not s.active), None)
        return paused or self._above_share(following.client)

    def park(self, sequence: Sequence, caches: Iterable[KVCache]) -> None:
        """Let a sequence wait without a row; these caches hold what it has read and written."""
        self.rows.park(sequence, caches)
        sequence.state = State.WAITING
        self._parked.add(sequence)
        self._queues.setdefault(sequence.client, deque()).appendleft(sequence)

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences; return those that are ready to run at once."""
        ready: list[Sequence] = []
        self.shares.advance(self._competing())
        while not self._full and (sequence := self._next) is not None:
            self._unqueue(sequence)
            donor = self._donor(sequence)
            if sequence.parked is not None:
                self.rows.unpark(sequence)
                was_read = sequence.started > 0
            else:
                self.rows.add(sequence, donor)
                was_read = donor is not None or len(sequence.prompt) == 1
            sequence.state = State.RUNNING if was_read else State.PREFILLING
            if was_read:
                ready.append(sequence)
        return ready

    @property
    def prefilling(self) -> Sequence | None:
        """Return the sequence whose prompt is read next; None without any."""
        reading = [s for s in self.rows.sequences if s.state is State.PREFILLING]
        if self._read % TURNS == TURNS - 1:
            return min(reading, key=lambda s: s.id, default=None)
        return min(reading, key=lambda s: (self._length(s), s.id), default=None)

    def count_chunk(self, sequence: Sequence, tokens: int) -> None:
        """Count a chunk of a prompt that was read."""
        self._read += 1
        self.shares.charge(sequence.client, tokens)

    def count_round(self, decoded: Iterable[Sequence]) -> None:
        """Count what a round gave, for each row at least a token, though a ban took it back."""
        for sequence in decoded:
            emitted = sequence.rounds[-1].emitted if sequence.rounds else 0
            self.shares.charge(sequence.client, max(1, emitted))

    def leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Sequence | None:
        """End a sequence; return the sibling that took its row over, ready to run, if one did."""
        if sequence.state is State.FINISHED:
            return None
        sequence.finish, sequence.error = finish, error
        state, sequence.state = sequence.state, State.FINISHED
        sequence.parked = None
        if state is State.WAITING:
            if sequence in self._queues.get(sequence.client, ()):  # else it was never submitted
                self._unqueue(sequence)
            return None
        if state is State.RUNNING and sequence.cache_finite and self._queues:
            sibling = self._next
            if sibling is not None and sibling.parked is None and sibling.group == sequence.group is not None:
                self._unqueue(sibling)
                self.rows.succeed(sequence, sibling)
                sibling.state = State.RUNNING
                return sibling
        self.rows.remove(sequence)
        return None

    def _unqueue(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.client]
        queue.remove(sequence)
        self._parked.discard(sequence)
        if not queue:
            del self._queues[sequence.client]

    @property
    def _next(self) -> Sequence | None:
        """Return the sequence that gets the next free row."""
        heads = [head for queue in self._queues.values() if (head := self._head(queue)) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        held = self._held()
        return min(heads, key=lambda head: (held[head.client], self.shares.lead(head.client), head.id))

    def _head(self, queue: deque[Sequence]) -> Sequence | None:
        """Return the first sequence of a client that is not paused, unless its prompt is on the way."""
        head = next((s for s in queue if s.paused_at is None), None)
        if head is None or head.parked is not None:
            return head
        donor = self._donor(head)
        return None if donor is not None and donor.state is State.PREFILLING else head

    def _above_share(self, client: str) -> Sequence | None:
        """Return the sequence that gives its row to a client; None where no other has two rows more."""
        held = self._held()
        richest = max(held, key=lambda each: (held[each], self.shares.lead(each)))
        if held[richest] < held[client] + 2:
            return None
        return max((s for s in self.rows.sequences if s.client == richest), key=lambda s: s.id)

    def _competing(self) -> frozenset[str]:
        """Return the clients that wait for a row or for a chunk."""
        queued = (client for client, queue in self._queues.items() if any(s.paused_at is None for s in queue))
        reading = (s.client for s in self.rows.sequences if s.state is State.PREFILLING)
        return frozenset(chain(queued, reading))

    def _held(self) -> Counter[str]:
        """Return how many rows each client has."""
        return Counter(s.client for s in self.rows.sequences if s.state is not State.FINISHED)

    def _length(self, sequence: Sequence) -> float:
        """Return the unread tokens of a prompt, with those that its client has had more than others."""
        unread = len(sequence.prompt) - 1 - self.rows.caches[0].lengths[sequence.row]
        return unread + min(unread, max(0, self.shares.lead(sequence.client)))

    @property
    def _full(self) -> bool:
        return len(self.rows.sequences) == self.rows.capacity

    def _donor(self, sequence: Sequence) -> Sequence | None:
        if sequence.group is None:
            return None
        return next((s for s in self.rows.sequences if s.group == sequence.group), None)
