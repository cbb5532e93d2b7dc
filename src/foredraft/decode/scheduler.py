"""Scheduler: gives out rows of the cache and passes over chunks of prompts, in fair shares between clients.

*Rows* go to the client with the fewest, and among equals to the one that has had the fewest tokens
(`Shares`). Where all are taken and a waiting client has at least two fewer than another one, the latest
sequence of the client with the most is *parked*: its row moves to host memory, and it goes on later with the
same text. *Chunks* go to the prompt with the fewest unread tokens and those that its client has had more than
others, up to a doubling; one chunk in `TURNS` goes to the prompt that came first, so none starves. Samples of
one prompt copy the rows of the first, or take a finished one's over. A paused sequence is parked where
another waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from foredraft.decode.sequence import Finish, Sequence, State
from foredraft.model.cache import KVCache, Span


class Shares:
    """Counts the tokens of clients, from the clock on."""

    def __init__(self) -> None:
        self._leads: dict[str, float] = {}  # of clients that wait, and of others that are ahead of the clock
        self._given: Counter[str] = Counter()  # tokens since the clock moved
        self._waiting: frozenset[str] = frozenset()  # clients that waited when the clock moved

    def lead(self, client: str) -> float:
        """Return how many tokens a client has had more than an equal part; below 0 where it has had fewer."""
        return self._leads.get(client, 0.0)

    def charge(self, client: str, tokens: int) -> None:
        self._given[client] += tokens

    def advance(self, waiting: frozenset[str]) -> None:
        """Move the clock by what was given since the last time; `waiting` are the clients that wait now."""
        before, given = self._waiting, self._given
        part = sum(given[client] for client in before) / max(1, len(before))
        leads = {
            client: self.lead(client) + given[client] - part for client in {*self._leads, *given, *before}
        }
        self._leads = {
            client: lead
            for client, lead in leads.items()
            if lead > 0 or (client in before and client in waiting)
        }
        self._waiting = waiting
        given.clear()


APART = 64  # tokens from one snapshot of a text that a ban may take back to the next


class Rows:
    """`sequences[r]` owns row r of every cache."""

    def __init__(self, caches: Iterable[KVCache]) -> None:
        unique = {id(cache): cache for cache in caches}  # a self-drafter shares the target's
        self.caches = list(unique.values())
        self.recurrent = [cache for cache in self.caches if cache.recurrent is not None]
        self.capacity = min(cache.rows for cache in self.caches)
        self.sequences: list[Sequence] = []

    def add(self, sequence: Sequence, donor: Sequence | None = None) -> None:
        """Give the sequence the next free row; with a donor, its prompt's cache rows are copied."""
        assert len(self.sequences) < self.capacity
        sequence.row, shared = len(self.sequences), len(sequence.prompt) - 1
        self.sequences.append(sequence)
        for cache in self.caches:
            if donor is None:
                cache.lengths[sequence.row] = 0
            else:
                cache.copy_row(donor.row, sequence.row, min(cache.lengths[donor.row], shared))
        if donor is not None:
            self.cut_to_prompt(sequence, donor.snapshots)

    def cut_to_prompt(self, choice: Sequence, snapshots: dict[KVCache, list[Span]]) -> None:
        """Leave in a row what a choice shares with its donor: the prompt but for its last token."""
        choice.snapshots = snapshots
        self.cut(choice, len(choice.prompt) - 1)

    def cut(self, sequence: Sequence, length: int) -> None:
        """Cut a row to a length at most; where states are beyond it, to the last snapshot before it."""
        row, kept = sequence.row, sequence.snapshots
        sequence.snapshots = {cache: [s for s in spans if s.stop <= length] for cache, spans in kept.items()}
        for cache in self.caches:
            cache.lengths[row] = min(cache.lengths[row], length)
        for cache in self.recurrent:
            if cache.base(row) > cache.lengths[row]:
                spans = sequence.snapshots.get(cache)
                if spans:
                    cache.put_back(replace(spans[-1], row=row))
                cache.lengths[row] = spans[-1].stop if spans else 0

    def keep_snapshot(self, sequence: Sequence, caches: Collection[KVCache]) -> None:
        """Keep the states of a row that may be cut: where the prompt ends, and some tokens further on."""
        row, settled = sequence.row, len(sequence.prompt) - 1 + sequence.settled
        for cache in filter(caches.__contains__, self.recurrent):
            spans, length = sequence.snapshots.setdefault(cache, []), cache.lengths[row]
            if length >= (spans[-1].stop + APART if spans else 1):
                spans.append(cache.take(row, length, length))
            while len(spans) > 2 and spans[2].stop <= settled:
                del spans[1]

    def remove(self, sequence: Sequence) -> None:
        """Free the row; the last row moves into it. One that may hold NaN, which no mask hides, is zeroed."""
        row, last = sequence.row, self.sequences.pop()
        sequence.row = -1
        for cache in self.caches:
            if not sequence.cache_finite:
                cache.zero_row(row)
            if last is not sequence:
                cache.copy_row(last.row, row, cache.lengths[last.row])
                if not last.cache_finite:
                    cache.zero_row(last.row)
            cache.lengths[len(self.sequences)] = 0
        if last is not sequence:
            last.row = row
            self.sequences[row] = last


# Of so many chunks, one goes to the prompt that came first. Short prompts lose one pass in so many to a long
# one, which takes at most so many times as long (benchmarks/notes/batches.md).
TURNS = 4


class Scheduler:
    """Gives out the rows, and chooses which prompt is read next."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.shares = Shares()  # what each client has used
        self._queues: dict[str, deque[Sequence]] = {}  # by client; none is empty
        self._parked: set[Sequence] = set()
        self._read = 0  # chunks so far

    def submit(self, sequence: Sequence) -> None:
        if not self._competing():
            self.shares = Shares()
        self._queues.setdefault(sequence.client, deque()).append(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        return list(chain.from_iterable(tuple(self._queues.values())))

    @property
    def steady(self) -> bool:
        sequences = self.rows.sequences
        return not self._queues and bool(sequences) and all(s.active for s in sequences)

    @property
    def running(self) -> bool:
        return any(s.active for s in self.rows.sequences)

    @property
    def idle(self) -> bool:
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
        """Let a sequence wait without a row; host memory keeps what these caches hold of it."""
        spans = {cache: cache.take(sequence.row, 0, cache.lengths[sequence.row]) for cache in caches}
        sequence.parked = {cache: span.on_host() for cache, span in spans.items()}
        self.rows.remove(sequence)
        sequence.state = State.WAITING
        self._parked.add(sequence)
        self._queues.setdefault(sequence.client, deque()).appendleft(sequence)

    def admit(self) -> list[Sequence]:
        """Give free rows to waiting sequences; return those that are ready to run at once."""
        ready: list[Sequence] = []
        self.shares.advance(self._competing())
        while not self._full and (sequence := self._next) is not None:
            self._unqueue(sequence)
            parked, sequence.parked = sequence.parked, None
            donor = None if parked is not None else self._donor(sequence)
            self.rows.add(sequence, donor)
            for cache, span in (parked or {}).items():
                cache.put_back(replace(span, row=sequence.row))
                cache.lengths[sequence.row] = span.stop
            was_read = self.rows.caches[0].lengths[sequence.row] == len(sequence.tokens) - 1
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
        self._read += 1
        self.shares.charge(sequence.client, tokens)

    def count_round(self, decoded: Iterable[Sequence]) -> None:
        """Count what a round gave, for each row at least a token, though a ban took it back."""
        for sequence in decoded:
            emitted = sequence.rounds[-1].emitted if sequence.rounds else 0
            self.shares.charge(sequence.client, max(1, emitted))

    def leave(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Sequence | None:
        """End a sequence; return the choice of its prompt that took its row over, if any, ready to run."""
        if sequence.state is State.FINISHED:
            return None
        sequence.finish, sequence.error = finish, error
        state, sequence.state = sequence.state, State.FINISHED
        snapshots, sequence.snapshots, sequence.parked = sequence.snapshots, {}, None
        if state is State.WAITING:
            if sequence in self._queues.get(sequence.client, ()):  # else it was never submitted
                self._unqueue(sequence)
            return None
        if state is State.RUNNING and sequence.cache_finite and self._queues:
            choice = self._next
            fresh = choice is not None and choice.parked is None
            if choice is not None and fresh and choice.group == sequence.group is not None:
                self._unqueue(choice)
                choice.row, sequence.row, choice.state = sequence.row, -1, State.RUNNING
                self.rows.sequences[choice.row] = choice
                self.rows.cut_to_prompt(choice, snapshots)  # the row holds the choice's prompt already
                return choice
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
        return Counter(s.client for s in self.rows.sequences if s.state is not State.FINISHED)

    def _length(self, sequence: Sequence) -> float:
        """Return the unread tokens of a prompt, with those that its client has had more than others."""
        unread = len(sequence.tokens) - 1 - self.rows.caches[0].lengths[sequence.row]
        return unread + min(unread, max(0, self.shares.lead(sequence.client)))

    @property
    def _full(self) -> bool:
        return len(self.rows.sequences) == self.rows.capacity

    def _donor(self, sequence: Sequence) -> Sequence | None:
        if sequence.group is None:
            return None
        return next((s for s in self.rows.sequences if s.group == sequence.group), None)
