"""Drafts copied from a text: prompt lookup (Saxena 2023, "Prompt Lookup Decoding") and predicted outputs.

Lookup proposes what followed the *latest* occurrence of the longest suffix of the text that occurred before.
An index maps every n-gram of prompt and output to where it last ended, so a token costs O(n) to add and to
look up.

A prediction is a text that the request expects, such as a file before an edit (the OpenAI API's "predicted
outputs"). An alignment follows the output through it. After a token that differs it assumes that one token
replaced one, until the output's last tokens are found in the text again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from foredraft.decode.drafter import ModelFreeDrafter, Peek
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Nothing


def repeated(ids: Seq[int], size: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same text."""
    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


Gram = tuple[int, ...]

# Matching tokens before both places -> P(the next one matches), on source code: a policy begins with these.
CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85}


class NGramIndex:
    """Index from n-gram to the position after its latest occurrence, but for the text's own suffix."""

    def __init__(self, longest: int, tokens: Seq[int] = ()) -> None:
        self.longest = longest  # largest n
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
        """Return the length of the longest suffix seen before, or 0, and the position after it there."""
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
        _, after = self.match()
        return self.tokens[after : after + most]


class Lookup(ModelFreeDrafter):
    """A model-free drafter that costs no forward, over an index per sequence."""

    name = "lookup"

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest  # largest n of the n-grams
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


LONGEST = 3  # tokens of a run that is looked up
# Tokens of the output before the place that were predicted -> P(the next is): a policy begins with these.
PREDICTED_CONFIDENCE = {0: 0.3, 1: 0.5, 3: 0.8, 8: 0.95}


class Alignment:
    """The place of an output in a prediction."""

    def __init__(self, predicted: Seq[int]) -> None:
        self.predicted = list(predicted)  # token ids
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of tokens -> where it ends, ascending
        for n in range(1, LONGEST + 1):
            for end in range(n, len(self.predicted) + 1):
                self._places.setdefault(tuple(self.predicted[end - n : end]), []).append(end)
        self._begin()

    def _begin(self) -> None:
        self.place, self._read = 0, 0
        self.matched = LONGEST  # a request that gives a prediction expects its beginning

    def follow(self, output: Seq[int]) -> None:
        """Follow the output up to its end; `output` has all its new tokens."""
        if len(output) < self._read:  # a ban took text back
            self._begin()
        for end in range(self._read, len(output)):
            if self.place < len(self.predicted) and self.predicted[self.place] == output[end]:
                self.place, self.matched = self.place + 1, self.matched + 1
            else:
                last = output[max(0, end + 1 - LONGEST) : end + 1]
                self.place, self.matched = self._found(last) or (self.place + 1, 0)
        self._read = len(output)

    def _found(self, last: Seq[int]) -> tuple[int, int] | None:
        """Return the place after the longest run of the output's last tokens, and the length of the run."""
        expected = self.place + 1
        for n in range(len(last), 0, -1):
            if places := self._places.get(tuple(last[-n:])):
                at = bisect_left(places, expected)
                return min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - expected)), n
        return None

    def continuation(self, most: int) -> list[int]:
        """Return at most `most` tokens that the output is expected to go on with."""
        return self.predicted[self.place : self.place + most]


class PredictedOutputs(ModelFreeDrafter):
    """A model-free drafter that costs no forward, for requests that give a prediction."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[int, Alignment] = {}

    def join(self, sequence: Sequence) -> None:
        self._alignments[sequence.id] = Alignment(sequence.prediction)
        self.rewind(sequence)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._alignments[sequence.id].continuation(budget) for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        alignment = self._alignments[sequence.id]
        length = max(length for length in PREDICTED_CONFIDENCE if length <= alignment.matched)
        most = max(0, len(alignment.predicted) - alignment.place)
        return Peek(min(limit, most), PREDICTED_CONFIDENCE[length])

    def rewind(self, sequence: Sequence) -> None:
        self._alignments[sequence.id].follow(sequence.new_ids)

    def leave(self, sequence: Sequence) -> None:
        self._alignments.pop(sequence.id, None)


PREDICTION_ASSET = Nothing(PredictedOutputs)
