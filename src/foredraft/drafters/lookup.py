"""Drafts copied from texts: prompt lookup, predicted outputs, and suffixes of recent texts.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding") proposes what followed the *latest* occurrence of the
longest suffix of the text that occurred before, among suffixes of a few tokens.

A prediction is a text that the request expects, such as a file before an edit (the OpenAI API's "predicted
outputs"). An alignment follows the output through it. After a token that differs it assumes that one token
replaced one, until the output's last tokens are found in the text again.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): agents ask for nearly the same again and again. The
drafter looks for the longest suffix of the text that occurred before, in the request's text and in
`RecentTexts`, and proposes what most occurrences went on with. A draft ends where too few of them agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from foredraft.decode.drafter import ModelFreeDrafter, Peek
from foredraft.decode.sequence import Finish, Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Nothing, Parts
from foredraft.drafters.recent_texts import LONGEST_MATCH, IndexedDrafter, RecentTexts, TextsFile
from foredraft.errors import Option


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
        return [self._search(sequence, budget)[1][:budget] for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        length, tokens = self._search(sequence, limit)
        confidence = CONFIDENCE[max(known for known in CONFIDENCE if known <= max(length, 1))]
        return Peek(min(limit, len(tokens)), confidence)

    def _search(self, sequence: Sequence, most: int) -> tuple[int, list[int]]:
        """Return the length of the match, and `most` or more of the tokens that followed it."""
        asked, length, tokens = self.found.get(sequence.id, (-1, 0, []))
        if asked < most:
            tail = sequence.tokens[-self.tail :]
            length, continuations = self.indices[sequence.id].search(tail, most, occurrences=1)
            tokens = continuations[0] if continuations else []
            self.found[sequence.id] = most, length, tokens
        return length, tokens


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


OWN_RUNS = (8, 3, 1)  # tokens of the runs of the request's own text that have tables
LONGEST_DRAFT = 24  # tokens: a pass over as many columns costs far less than a plain step for each
DRAFT_PER_MATCH = 4  # tokens of a draft at most for each one of the match
LEAST_CHANCE = 0.25  # by the counts, that a draft is right up to a token: it ends before a less likely one
CONTEXT = 8  # tokens of the prompt that are kept before an output, so that its first tokens have a match
DEFAULT_MIB = 64  # of memory for texts where a file of them is given: some 130,000 tokens
# Matching tokens -> P(the next one matches too) where all occurrences agree: a policy begins with these.
SUFFIX_CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85, 12: 0.95}
LEVELS = (0.2, *SUFFIX_CONFIDENCE.values())  # a confidence is one of these
ENDED = {Finish.EOS, Finish.STOP, Finish.LENGTH, Finish.CONSTRAINT}  # of requests whose texts are kept


class SuffixDraft(NamedTuple):
    """A draft, and rough probability that each of its tokens is accepted."""

    tokens: list[int]
    confidence: float


class Suffix(IndexedDrafter):
    """A model-free drafter that costs no forward, over an index per sequence and one of recent texts."""

    name = "suffix"
    planned = longest_draft = LONGEST_DRAFT

    def __init__(self, texts: RecentTexts, file: TextsFile) -> None:
        super().__init__(OWN_RUNS)
        self.texts, self.file = texts, file

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence).tokens[:budget] for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        draft = self._draft(sequence)
        return Peek(min(limit, len(draft.tokens)), draft.confidence)

    def leave(self, sequence: Sequence) -> None:
        self.found.pop(sequence.id, None)
        if self.indices.pop(sequence.id, None) is not None and sequence.finish in ENDED:
            begin = max(0, len(sequence.prompt) - CONTEXT)
            self.texts.add(sequence.text_scope, sequence.tokens[begin:])

    def save(self, path: Path | None = None) -> int:
        """Write the texts to their file, or to another one, and return how many; any thread may call this."""
        texts = self.texts.all()
        self.file.write(texts, path)
        return len(texts)

    def _draft(self, sequence: Sequence) -> SuffixDraft:
        """Return the draft by what followed each occurrence of the longest match."""
        known: SuffixDraft | None = self.found.get(sequence.id)
        if known is not None:
            return known
        tail = sequence.tokens[-LONGEST_MATCH:]
        found = [
            self.indices[sequence.id].search(tail, LONGEST_DRAFT),
            self.texts.search(sequence.text_scope, tail, LONGEST_DRAFT),
        ]
        length = max(matches.length for matches in found)
        longest = [each for m in found if m.length == length for each in m.continuations]
        tokens, share = agreed(longest, min(DRAFT_PER_MATCH * length, LONGEST_DRAFT))
        chance = (
            share * SUFFIX_CONFIDENCE[max(known for known in SUFFIX_CONFIDENCE if known <= length)]
            if tokens
            else 0.0
        )
        confidence = max((level for level in LEVELS if level <= chance), default=LEVELS[0])
        draft = self.found[sequence.id] = SuffixDraft(tokens, confidence)
        return draft


def agreed(continuations: list[list[int]], most: int) -> tuple[list[int], float]:
    """Return the tokens with which most continuations go on, and the share of them that have the first one.

    The tokens end where the product of the shares falls below LEAST_CHANCE.

    Examples:
        >>> agreed([[1, 2, 3], [1, 2, 4], [1, 5]], most=9)
        ([1, 2, 3], 1.0)
    """
    tokens: list[int] = []
    chance, first = 1.0, 1.0
    going: dict[tuple[int, ...], int] = {}  # continuation -> how often it occurred: most are the same ones
    for each in map(tuple, continuations):
        going[each] = going.get(each, 0) + 1
    for at in range(most):
        if len(going) == 1:
            [only] = going
            return [*tokens, *only[at:most]], first
        counts: dict[int, int] = {}
        for each, times in going.items():
            if len(each) > at:
                counts[each[at]] = counts.get(each[at], 0) + times
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        chance *= counts[token] / sum(counts.values())
        if chance < LEAST_CHANCE:
            break
        first = first if tokens else chance
        tokens.append(token)
        going = {each: times for each, times in going.items() if len(each) > at and each[at] == token}
    return tokens, first


class TextsAsset(Asset):
    """Memory for texts. The drafter is there where the user asks for it, or for such memory."""

    missing = Missing(
        "is there only where it is asked for", ("name it, or give ", Option("recent_texts", DEFAULT_MIB))
    )

    def find(self, search: AssetSearch) -> Found | Missing:
        mib, path = search.options["recent_texts"], search.options["texts_file"]
        if mib is None and path is None and not search.needed:
            return self.missing
        most_bytes = (mib if mib is not None else 0 if path is None else DEFAULT_MIB) << 20
        file = TextsFile.of(search.target, None if path is None else Path(path))
        texts = file.read()

        def build(parts: Parts) -> Suffix:
            recent = RecentTexts(most_bytes)
            for text in texts:
                recent.add(*text)
            return Suffix(recent, file)

        return Found(
            bytes=most_bytes if search.device.type == "cpu" else 0, planned=LONGEST_DRAFT,
            longest_draft=LONGEST_DRAFT, about=f"its own text, and {most_bytes >> 20} MiB of recent ones",
            build=build,
        )  # fmt: skip


TEXTS_ASSET = TextsAsset()
