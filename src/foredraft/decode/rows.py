"""Rows: which row of every cache a sequence has, and the only copies of cache rows there are.

A sequence has one row index, the same in every cache (target, draft, adapter). Rows in use are a
prefix, so a pass over the batch reads views, not gathers. Copies: the prompt's rows from a donor to
its siblings (n samples of one prompt), the last row into a freed one, and the row of a paused sequence out
of the caches and back, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache

__all__ = ["Rows"]


class Rows:
    """`sequences[r]` owns row r of every cache."""

    def __init__(self, caches: Iterable[KVCache]) -> None:
        unique = {id(cache): cache for cache in caches}  # a self-drafter shares the target's
        self.caches = list(unique.values())
        self.capacity = min(cache.rows for cache in self.caches)
        self.sequences: list[Sequence] = []

    def add(self, sequence: Sequence, donor: Sequence | None = None) -> None:
        """Give the sequence the next free row; with a donor, its prompt's cache rows are copied."""
        assert len(self.sequences) < self.capacity
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        for cache in self.caches:
            if donor is None:
                cache.lengths[sequence.row] = 0
            else:
                cache.copy_row(donor.row, sequence.row, _prompt_rows(cache, donor, sequence))

    def park(self, sequence: Sequence, caches: Iterable[KVCache]) -> None:
        """Free the row of a sequence that goes on later; host memory keeps what these caches hold of it."""
        spans = {cache: cache.take(sequence.row, 0, cache.lengths[sequence.row]) for cache in caches}
        sequence.parked = {
            cache: replace(span, parts=tuple(part.cpu() for part in span.parts))
            for cache, span in spans.items()
        }
        self.remove(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Give a parked sequence a free row that holds what its old one held."""
        assert sequence.parked is not None
        self.add(sequence)
        for cache, span in sequence.parked.items():
            cache.put_back(replace(span, row=sequence.row))
            cache.lengths[sequence.row] = span.stop
        sequence.parked = None

    def succeed(self, sequence: Sequence, sibling: Sequence) -> None:
        """Let a sibling take the row over in place, because it holds the prompt already."""
        for cache in self.caches:
            cache.lengths[sequence.row] = _prompt_rows(cache, sequence, sibling)
        sibling.row, sequence.row = sequence.row, -1
        self.sequences[sibling.row] = sibling

    def remove(self, sequence: Sequence) -> None:
        """Free the row; the last row moves into it.

        A row that may hold NaN, which no mask hides, is zeroed.
        """
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


def _prompt_rows(cache: KVCache, donor: Sequence, sequence: Sequence) -> int:
    """Return how many of the donor's positions the sibling shares: the prompt but for its last token."""
    return min(cache.lengths[donor.row], len(sequence.prompt) - 1)
