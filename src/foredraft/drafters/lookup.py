"""Prompt lookup: the text so far guesses what comes next (Saxena 2023, "Prompt Lookup Decoding").

The longest suffix of the text, of n tokens down to 1, that occurred before is looked up, and what
followed its *latest* occurrence is proposed; a short tail is as good as a long one. The index maps every
n-gram to where it last ended, so a token costs O(n) to add and to look up, however long the text;
prompt and output are both in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache

__all__ = ["Lookup", "NGramIndex"]

Gram = tuple[int, ...]


class NGramIndex:
    """n-gram -> the position after its latest occurrence, for n = 1 .. longest.

    A gram is entered when the token *after* it arrives, so the text's own suffix never finds itself.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._after: dict[Gram, int] = {}
        self._undo: list[list[tuple[Gram, int | None]]] = []  # per token: what its entries replaced

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            replaced: list[tuple[Gram, int | None]] = []
            for n in range(1, min(self.longest, end) + 1):
                gram = tuple(self.tokens[end - n : end])
                replaced.append((gram, self._after.get(gram)))
                self._after[gram] = end
            self._undo.append(replaced)
            self.tokens.append(token)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        while len(self.tokens) > length:
            self.tokens.pop()
            for gram, before in reversed(self._undo.pop()):
                if before is None:
                    del self._after[gram]
                else:
                    self._after[gram] = before

    def continuation(self, most: int) -> list[int]:
        """What followed the latest occurrence of the longest suffix seen before; at most `most` tokens."""
        end = len(self.tokens)
        for n in range(min(self.longest, end), 0, -1):
            after = self._after.get(tuple(self.tokens[end - n :]))
            if after is not None:
                return self.tokens[after : after + most]
        return []


class Lookup:
    """A Guesser over an index per sequence."""

    name = "lookup"
    free = True
    taps: tuple[int, ...] = ()
    max_length: int | None = None
    caches: tuple[KVCache, ...] = ()

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self._indices: dict[int, NGramIndex] = {}

    def join(self, sequence: Sequence) -> None:
        index = NGramIndex(self.longest)
        index.extend(sequence.tokens)
        self._indices[sequence.id] = index

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._indices[sequence.id].continuation(budget) for sequence, budget in requests]

    def observe(self, sequence: Sequence, start: int, states: Mapping[int, Tensor]) -> None:
        return None

    def rewind(self, sequence: Sequence) -> None:
        """Text only grows, or after a ban's rollback is a prefix of what it was."""
        index = self._indices[sequence.id]
        common = min(len(index.tokens), len(sequence.tokens))
        index.rewind(common)
        index.extend(sequence.tokens[common:])

    def leave(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)
