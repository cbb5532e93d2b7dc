"""Prompt lookup: the text so far guesses what comes next (Saxena 2023, "Prompt Lookup Decoding").

The longest suffix of the text, of n tokens down to 1, that occurred before is looked up, and what
followed its *latest* occurrence is proposed; a short tail is as good as a long one. The index maps every
n-gram to where it last ended, so a token costs O(n) to add and to look up, however long the text;
prompt and output are both in it. The more tokens before both places are the same, the surer it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from foredraft.decode.sequence import Sequence
from foredraft.model.cache import KVCache

__all__ = ["Lookup", "NGramIndex"]

Gram = tuple[int, ...]

# Of so many tokens that are the same before both places or more: how often the next one is the same too, on
# source code. Only a beginning: a policy counts for itself.
SURE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85}


class NGramIndex:
    """n-gram -> the position after its latest occurrence, for n = 1 .. longest.

    A gram is entered when the token *after* it arrives, so the text's own suffix never finds itself. tokens:
    what the text begins with, entered at once; to forget some of these takes as long again.
    """

    def __init__(self, longest: int, tokens: Seq[int] = ()) -> None:
        self.longest = longest
        self._begin(list(tokens))

    def _begin(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._after: dict[Gram, int] = {}
        for n in range(1, self.longest + 1):
            grams = zip(*(tokens[first:] for first in range(n)), strict=False)
            self._after.update(zip(grams, range(n, len(tokens)), strict=False))  # the latest stays
        self._found: tuple[int, int] | None = None  # `match`, of the text as it is
        # of each token that came later: what its entries replaced
        self._undo: list[list[tuple[Gram, int | None]]] = []

    def extend(self, tokens: list[int]) -> None:
        self._found = None
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
        if length < len(self.tokens) - len(self._undo):
            self._begin(self.tokens[:length])
        self._found = None
        while len(self.tokens) > length:
            self.tokens.pop()
            for gram, before in reversed(self._undo.pop()):
                if before is None:
                    del self._after[gram]
                else:
                    self._after[gram] = before

    def match(self) -> tuple[int, int]:
        """The longest suffix seen before: its tokens, and the position after its latest occurrence; 0 and the
        end of the text where there is none."""
        if self._found is None:
            end, self._found = len(self.tokens), (0, len(self.tokens))
            for n in range(min(self.longest, end), 0, -1):
                after = self._after.get(tuple(self.tokens[end - n :]))
                if after is not None:
                    self._found = n, after
                    break
        return self._found

    def same(self, after: int, most: int) -> int:
        """How many tokens before that position are the text's last ones, in order; at most `most`."""
        end, n = len(self.tokens), 0
        while n < min(most, after) and self.tokens[after - 1 - n] == self.tokens[end - 1 - n]:
            n += 1
        return n

    def continuation(self, most: int) -> list[int]:
        """What followed the latest occurrence of the longest suffix seen before; at most `most` tokens."""
        _, after = self.match()
        return self.tokens[after : after + most]


class Lookup:
    """A Free guesser over an index per sequence."""

    name = "lookup"
    taps: tuple[int, ...] = ()
    max_length: int | None = None
    caches: tuple[KVCache, ...] = ()

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self._indices: dict[int, NGramIndex] = {}

    def join(self, sequence: Sequence) -> None:
        self._indices[sequence.id] = NGramIndex(self.longest, sequence.tokens)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._indices[sequence.id].continuation(budget) for sequence, budget in requests]

    def has(self, sequence: Sequence, most: int) -> tuple[int, float]:
        index = self._indices[sequence.id]
        n, after = index.match()
        if n == self.longest:  # it may be the tail of a longer one
            n = index.same(after, max(SURE))
        sure = SURE[max(known for known in SURE if known <= max(n, 1))]
        return min(most, len(index.tokens) - after), sure

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
