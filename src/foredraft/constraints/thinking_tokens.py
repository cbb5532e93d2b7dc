"""Thinking tokens: what each token of a vocabulary does to the markers around a text's thinking.

Tokens are looked at by their bytes, so that it does not matter how a marker is cut into tokens. A token that
completes the closing marker may add the line breaks that models write behind it, and nothing else: the
content begins with a token of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Phase", "Place", "ThinkingTokens"]

LINE_BREAK = b"\n"
LINE_BREAKS = 2  # between the closing marker and the content, at most, as chat templates write them


class Phase(Enum):
    """Where a text stands; what `Place.read` counts in each phase."""

    OPENING = "bytes of the opening marker"
    THINKING = "last bytes that begin the closing marker"
    BREAK = "line breaks behind the closing marker"
    CONTENT = "nothing"


class Place(NamedTuple):
    """Where a text stands, and how far."""

    phase: Phase
    read: int = 0


CONTENT = Place(Phase.CONTENT)


class ThinkingTokens:
    """The tokens of a vocabulary, seen from the markers of thinking; sequences share it.

    Args:
        texts: [V] the bytes that each id adds to a text.
        opens, closes: The markers around thinking.
        ends: Ids that end a text; they are forbidden before the content.
    """

    def __init__(self, texts: Sequence[bytes], opens: str, closes: str, ends: Collection[int]) -> None:
        self._texts, self._ends = texts, list(ends)
        self._opens, self._closes = opens.encode(), closes.encode()
        self._fallbacks = _fallbacks(self._closes)
        self._masks: dict[Place, Tensor] = {}
        closing = self._closes[-1]
        self._closing = [token for token, text in enumerate(texts) if closing in text]
        self._by_first: dict[int, list[int]] = {byte: [] for byte in self._opens + LINE_BREAK}
        for token, text in enumerate(texts):
            if text and text[0] in self._by_first:
                self._by_first[text[0]].append(token)

    def after(self, place: Place, token: int) -> Place | None:
        """Return where a text stands after a further token.

        A token that belongs to no marker and to no thinking begins the content.

        Returns:
            The place; None where the token completes the closing marker and goes on behind it.
        """
        text = self._texts[token]
        if place.phase is Phase.OPENING:
            rest = self._opens[place.read :]
            if text.startswith(rest):
                return self._thought(0, text.removeprefix(rest))
            return Place(Phase.OPENING, place.read + len(text)) if text and rest.startswith(text) else CONTENT
        if place.phase is Phase.THINKING:
            return self._thought(place.read, text)
        if place.phase is Phase.BREAK and text:
            breaks = place.read + len(text)
            return Place(Phase.BREAK, breaks) if _breaks(text, breaks) else CONTENT
        return CONTENT

    def _thought(self, read: int, text: bytes) -> Place | None:
        """Return where a text stands after further bytes of thinking."""
        for at, byte in enumerate(text, start=1):
            while read and self._closes[read] != byte:
                read = self._fallbacks[read]
            read += self._closes[read] == byte
            if read == len(self._closes):
                rest = text[at:]
                return Place(Phase.BREAK, len(rest)) if _breaks(rest, len(rest)) else None
        return Place(Phase.THINKING, read)

    def mask(self, place: Place) -> Tensor:
        """Return the tokens that may follow before the content, [V] bool; the caller does not write to it."""
        mask = self._masks.get(place)
        if mask is None:
            mask = self._masks[place] = self._made(place)
        return mask

    def _made(self, place: Place) -> Tensor:
        mask = torch.full((len(self._texts),), place.phase is Phase.THINKING)
        if place.phase is Phase.THINKING:
            mask[[token for token in self._closing if self.after(place, token) is None]] = False
        else:
            first = self._opens[place.read] if place.phase is Phase.OPENING else LINE_BREAK[0]
            going = [t for t in self._by_first[first] if self.after(place, t) not in (None, CONTENT)]
            mask[going] = True
        mask[self._ends] = False
        return mask


def _breaks(text: bytes, breaks: int) -> bool:
    """Return whether a text is line breaks alone, and no more of them have come than may."""
    return not text.strip(LINE_BREAK) and breaks <= LINE_BREAKS


def _fallbacks(marker: bytes) -> list[int]:
    """Return, for each number of bytes read, how many the longest shorter beginning at their end has.

    Knuth, Morris and Pratt 1977, "Fast pattern matching in strings".
    """
    found = [0, 0]
    for at in range(1, len(marker)):
        read = found[at]
        while read and marker[read] != marker[at]:
            read = found[read]
        found.append(read + (marker[read] == marker[at]))
    return found
