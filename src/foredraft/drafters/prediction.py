"""Prediction: a text that the request expects, such as a file before an edit; drafts copy it.

The request brings the text (the OpenAI API's "predicted outputs"). An alignment follows the output through
it. After a token that differs, it assumes that one token replaced one, until the last tokens of the output
are found in the prediction again: the longest run of them, and of several places the nearest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from foredraft.decode.drafter import Guesser, Peek
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Nothing

__all__ = ["ASSET", "Alignment", "Prediction"]

LONGEST = 3  # tokens of a run that is looked up
# Tokens of the output before the place that are the prediction's -> P(the next is). A policy only begins with
# these numbers, and counts for itself from then on.
CONFIDENCE = {0: 0.3, 1: 0.5, 3: 0.8, 8: 0.95}


class Alignment:
    """The place of an output in a prediction.

    Args:
        predicted: Token ids.

    Attributes:
        place: The output is expected to go on with `predicted[place:]`.
        matched: Tokens of the output just before that equal the prediction's.
    """

    def __init__(self, predicted: Seq[int]) -> None:
        self.predicted = list(predicted)
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


class Prediction(Guesser):
    """A guesser that costs no forward, for requests that give a prediction."""

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
        confidence = CONFIDENCE[max(length for length in CONFIDENCE if length <= alignment.matched)]
        return Peek(min(limit, max(0, len(alignment.predicted) - alignment.place)), confidence)

    def rewind(self, sequence: Sequence) -> None:
        self._alignments[sequence.id].follow(sequence.new_ids)

    def leave(self, sequence: Sequence) -> None:
        self._alignments.pop(sequence.id, None)


ASSET = Nothing(Prediction)
