"""TokenTable: the bytes that every token id adds to a text, and what it does to the markers of its thinking.

Constraints look at bytes, so that no other tokenisation of a text or of a marker slips through. A token that
completes the closing marker may add line breaks, and nothing else: the content begins with a token of its
own.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.decode.text_buffer import Automaton
from foredraft.model.byte_codec import ByteCodec

CONTINUATION = range(0x80, 0xC0)  # first bytes of tokens that may complete a character


@dataclass(frozen=True, eq=False)
class TokenTable:
    texts: tuple[bytes, ...]  # [V] the bytes that each id adds to a text; empty where it shows none
    ends: frozenset[int] = frozenset()  # ids that end a text
    _completions: dict[bytes, frozenset[tuple[str, bytes]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        codec: ByteCodec,
        vocabulary: int,
        ends: frozenset[int] = frozenset(),
        *,
        show_special: bool = False,
    ) -> TokenTable:
        texts = codec.table(vocabulary)
        if show_special:
            for content, id in codec.specials.items():
                if id < vocabulary:
                    texts[id] = content.encode()
        return cls(tuple(texts), ends)

    @cached_property
    def decoded(self) -> tuple[list[str], dict[int, bytes]]:
        """The characters that each id completes by itself, [V], and the bytes that some ids leave open."""
        decoded = [codecs.utf_8_decode(text, "replace", False) for text in self.texts]
        pending = {
            id: text[used:]
            for id, (text, (_, used)) in enumerate(zip(self.texts, decoded, strict=True))
            if used < len(text)
        }
        return [characters for characters, _ in decoded], pending

    @cached_property
    def silent(self) -> Tensor:
        """Whether an id adds no text, [V] bool."""
        lengths = np.fromiter(map(len, self.texts), dtype=np.int64, count=len(self.texts))
        return torch.from_numpy(lengths == 0)

    @cached_property
    def continuing(self) -> list[int]:
        """Ids whose text begins with a continuation byte."""
        return [id for id, text in enumerate(self.texts) if text and text[0] in CONTINUATION]

    @cached_property
    def has_all_continuations(self) -> bool:
        """Whether tokens of one byte can complete every character, as in all byte-level vocabularies."""
        return {bytes([byte]) for byte in CONTINUATION} <= {self.texts[id] for id in self.continuing}

    def completions(self, pending: bytes) -> frozenset[tuple[str, bytes]]:
        """Return how one token can continue an incomplete character without breaking any."""
        found = self._completions.get(pending)
        if found is None:
            texts = {self.texts[id] for id in self.continuing}
            pairs = (_characters(pending + text) for text in texts)
            found = self._completions[pending] = frozenset(pair for pair in pairs if pair is not None)
        return found

    @cached_property
    def speaks(self) -> Tensor:
        """Whether an id adds text and is no end, [V] bool."""
        return ~self.silent & ~self._is_end

    @cached_property
    def idle(self) -> Tensor:
        """Whether an id adds no text and is no end, [V] bool: a text of such tokens stands still."""
        return self.silent & ~self._is_end

    @cached_property
    def _is_end(self) -> Tensor:
        marks = torch.zeros(len(self.texts), dtype=torch.bool)
        marks[[id for id in self.ends if id < len(self.texts)]] = True
        return marks

    def without_idle(self, mask: Tensor) -> Tensor:
        """Return the allowed tokens [V] bool; idle ones, which would fill a text, only beside others."""
        return mask if bool((mask & self.speaks).any()) else mask & ~self.idle


def _characters(data: bytes) -> tuple[str, bytes] | None:
    """Return characters, and the bytes of an incomplete one behind them; None if a byte is invalid."""
    try:
        characters, used = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    return characters, data[used:]


LINE_BREAK = b"\n"
LINE_BREAKS = 2  # between the closing marker and the content, at most, as chat templates write them


class Phase(Enum):
    """Where a text stands; what `ThinkingPlace.read` counts in each phase."""

    OPENING = "bytes of the opening marker"
    THINKING = "last bytes that begin the closing marker"
    BREAK = "line breaks behind the closing marker"
    CONTENT = "nothing"


class ThinkingPlace(NamedTuple):
    """Where a text stands, and how far."""

    phase: Phase
    read: int = 0


CONTENT = ThinkingPlace(Phase.CONTENT)


class ThinkingTokens:
    """The tokens of a vocabulary, seen from the markers of thinking; sequences share it."""

    def __init__(self, texts: Sequence[bytes], opens: str, closes: str, ends: Collection[int]) -> None:
        self._texts, self._ends = texts, list(ends)
        self._opens, self._closes = opens.encode(), closes.encode()
        self._marker = Automaton([self._closes.decode("latin-1")])  # of bytes; a node is how many were read
        self._masks: dict[ThinkingPlace, Tensor] = {}
        closing = self._closes[-1]
        self._closing = [token for token, text in enumerate(texts) if closing in text]
        self._by_first: dict[int, list[int]] = {byte: [] for byte in self._opens + LINE_BREAK}
        for token, text in enumerate(texts):
            if text and text[0] in self._by_first:
                self._by_first[text[0]].append(token)

    def after(self, place: ThinkingPlace, token: int) -> ThinkingPlace | None:
        """Return where a text stands after a token; one of no marker and no thinking begins the content."""
        text = self._texts[token]
        if place.phase is Phase.OPENING:
            rest = self._opens[place.read :]
            if text.startswith(rest):
                return self._thought(0, text.removeprefix(rest))
            return (
                ThinkingPlace(Phase.OPENING, place.read + len(text))
                if text and rest.startswith(text)
                else CONTENT
            )
        if place.phase is Phase.THINKING:
            return self._thought(place.read, text)
        if place.phase is Phase.BREAK and text:
            breaks = place.read + len(text)
            return ThinkingPlace(Phase.BREAK, breaks) if _breaks(text, breaks) else CONTENT
        return CONTENT

    def _thought(self, read: int, text: bytes) -> ThinkingPlace | None:
        """Return where a text stands after further bytes of thinking."""
        for at, byte in enumerate(text, start=1):
            read = self._marker.step(read, chr(byte))
            if read == len(self._closes):
                rest = text[at:]
                return ThinkingPlace(Phase.BREAK, len(rest)) if _breaks(rest, len(rest)) else None
        return ThinkingPlace(Phase.THINKING, read)

    def mask(self, place: ThinkingPlace) -> Tensor:
        """Return the tokens that may follow before the content, [V] bool; the caller does not write to it."""
        mask = self._masks.get(place)
        if mask is None:
            mask = self._masks[place] = self._made(place)
        return mask

    def _made(self, place: ThinkingPlace) -> Tensor:
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
