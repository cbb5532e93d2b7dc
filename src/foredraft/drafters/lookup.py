"""Drafts copied from a text: prompt lookup (Saxena 2023, "Prompt Lookup Decoding") and predicted outputs.

Lookup proposes what followed the *latest* occurrence of the longest suffix of the text that occurred before,
among suffixes of a few tokens.

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
from foredraft.drafters.recent_texts import IndexedDrafter, Matches


def repeated(ids: Seq[int], size: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same text."""
    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


# Matching tokens before both places -> P(the next one matches), on source code: a policy begins with these.
CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85}


class Lookup(IndexedDrafter):
    """A model-free drafter that costs no forward, over an index per sequence."""

    name = "lookup"

    def __init__(self, longest: int = 3) -> None:
        super().__init__(range(1, longest + 1))  # tokens of the suffixes that are looked up
        self.tail = max(longest, *CONFIDENCE)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        found = [self._search(sequence, budget).continuations for sequence, budget in requests]
        return [each[0] if each else [] for each in found]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        length, continuations = self._search(sequence, limit)
        confidence = CONFIDENCE[max(known for known in CONFIDENCE if known <= max(length, 1))]
        return Peek(sum(map(len, continuations)), confidence)

    def _search(self, sequence: Sequence, most: int) -> Matches:
        return self.indices[sequence.id].search(sequence.tokens[-self.tail :], most, occurrences=1)


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
