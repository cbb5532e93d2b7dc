"""A drafter that nothing else in this tree knows: with its line (`phrases_line`) it is all that a drafter needs.

It proposes the rest of the phrase, a list of token ids, that begins with the last token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from foredraft.decode.drafter import ModelFreeDrafter
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Asset, AssetSearch, Found, Missing, Parts
from foredraft.errors import ConfigError, Option

FILE = "phrases.json"
FEW = 9  # words: a vocabulary that is no larger has phrases of its own
BYTES_PER_TOKEN = 2**10

Phrase = list[int]


class Phrases(ModelFreeDrafter):
    name = "phrases"

    def __init__(self, phrases: list[Phrase], planned: int | None) -> None:
        self.after = {phrase[0]: phrase[1:] for phrase in reversed(phrases)}
        self.planned = planned

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.after.get(sequence.tokens[-1], [])[:budget] for sequence, budget in requests]


@dataclass(frozen=True, kw_only=True)
class FoundPhrases(Found):
    phrases: list[Phrase]

    def row_bytes(self, positions: int) -> int:
        return positions

    def make(self, parts: Parts) -> Phrases:
        return Phrases(self.phrases, self.planned)


class PhrasesAsset(Asset):
    missing = Missing("has no phrases for this model", ("give ", Option("draft"), f", a folder with {FILE}"))

    def knows(self, place: Path) -> bool:
        return (place / FILE).is_file()

    def find(self, search: AssetSearch) -> Found | Missing:
        words = search.target.spec.vocab_size
        if search.draft is not None and self.knows(search.draft):
            phrases, about = json.loads((search.draft / FILE).read_text()), f"the phrases of {search.draft}"
        elif words <= FEW:
            phrases, about = [[(word + i) % words for i in range(4)] for word in range(words)], "counting"
        else:
            return self.missing
        largest = max(max(phrase) for phrase in phrases)
        if largest >= words:
            raise ConfigError(
                f"whose phrases have token {largest}, but the model has {words} words",
                option="draft", value=str(search.draft), remedy="give phrases of this model",
            )  # fmt: skip
        size = BYTES_PER_TOKEN * sum(map(len, phrases))
        return FoundPhrases(bytes=size, planned=max(map(len, phrases)) - 1, about=about, phrases=phrases)


ASSET = PhrasesAsset()
