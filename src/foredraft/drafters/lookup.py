"""Prompt lookup: the text so far guesses what comes next (Saxena 2023, "Prompt Lookup Decoding").

The index finds the longest suffix of the text, of n tokens down to 1, that occurred before, and the drafter
proposes what followed its *latest* occurrence; a short continuation is as good as a long one. The index maps
every n-gram to where it last ended, so a token costs O(n) to add and to look up, however long the text;
prompt and output are both in it. The more tokens match before both places, the higher the confidence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foredraft.decode.drafter import Guesser, Peek
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Nothing

__all__ = ["ASSET", "Lookup", "NGramIndex"]

Gram = tuple[int, ...]

# Matching tokens before both places -> P(the next token matches too), as counted on source code. A policy
# only begins with these numbers, and counts for itself from then on.
CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85}


class NGramIndex:
    """Index from n-gram to the position after its latest occurrence, for n = 1 .. longest.

    A gram is entered when the token *after* it arrives, so the text's own suffix never finds itself.

    Args:
        longest: Largest n.
        tokens: Beginning of the text, entered at once. Rewinding into it builds the index anew.
    """

    def __init__(self, longest: int, tokens: Seq[int] = ()) -> None:
        self.longest = longest
        self._begin(list(tokens))

    def _begin(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._after: dict[Gram, int] = {}
        for n in range(1, self.longest + 1):
            grams = zip(*(tokens[first:] for first in range(n)), strict=False)
            self._after.update(zip(grams, range(n, len(tokens)), strict=False))  # the latest occurrence stays
        self._found: tuple[int, int] | None = None  # memo of `match`
        self._undo: list[list[tuple[Gram, int | None]]] = []  # per later token: the entries that it replaced

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text."""
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
        """Return the longest suffix seen before: its length, and the position after its latest occurrence.

        Returns (0, end of the text) where no suffix was seen before.
        """
        if self._found is None:
            end, self._found = len(self.tokens), (0, len(self.tokens))
            for n in range(min(self.longest, end), 0, -1):
                after = self._after.get(tuple(self.tokens[end - n :]))
                if after is not None:
                    self._found = n, after
                    break
        return self._found

    def common_suffix(self, after: int, most: int) -> int:
        """Return how many tokens before position `after` equal the text's last ones; at most `most`."""
        end, n = len(self.tokens), 0
        while n < min(most, after) and self.tokens[after - 1 - n] == self.tokens[end - 1 - n]:
            n += 1
        return n

    def continuation(self, most: int) -> list[int]:
        """Return what followed the latest occurrence of the longest known suffix; at most `most` tokens."""
        _, after = self.match()
        return self.tokens[after : after + most]


class Lookup(Guesser):
    """A guesser that costs no forward, over an index per sequence.

    Args:
        longest: Largest n of the n-grams.
    """

    name = "lookup"

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self._indices: dict[int, NGramIndex] = {}

    def join(self, sequence: Sequence) -> None:
        self._indices[sequence.id] = NGramIndex(self.longest, sequence.tokens)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._indices[sequence.id].continuation(budget) for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        index = self._indices[sequence.id]
        n, after = index.match()
        if n == self.longest:  # it may be the end of a longer match
            n = index.common_suffix(after, max(CONFIDENCE))
        confidence = CONFIDENCE[max(length for length in CONFIDENCE if length <= max(n, 1))]
        return Peek(min(limit, len(index.tokens) - after), confidence)

    def rewind(self, sequence: Sequence) -> None:
        index = self._indices[sequence.id]
        # Text only grows, or is a prefix of what it was after a ban's rollback.
        common = min(len(index.tokens), len(sequence.tokens))
        index.rewind(common)
        index.extend(sequence.tokens[common:])

    def leave(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)


ASSET = Nothing(Lookup)
