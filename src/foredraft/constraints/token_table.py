"""TokenTable: the bytes that every token id adds to a text.

Constraints look at text, not at tokens, so that no other tokenisation of a text slips through. A token may
hold several characters, or a part of one.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foredraft.model.byte_codec import ByteCodec

__all__ = ["TokenTable"]

CONTINUATION = range(0x80, 0xC0)  # first bytes of tokens that may complete a character


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The bytes of a model's tokens.

    Attributes:
        texts: [V] the bytes that each id adds to a text; empty where it shows none.
        ends: Ids that end a text.
    """

    texts: tuple[bytes, ...]
    ends: frozenset[int] = frozenset()
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
        """Return the table of a tokenizer.

        Args:
            codec: Of the target's tokenizer.
            vocabulary: Size V of the model.
            ends: Ids that end a text.
            show_special: Special tokens belong to the text.
        """
        texts = codec.table(vocabulary)
        if show_special:
            for content, id in codec.specials.items():
                if id < vocabulary:
                    texts[id] = content.encode()
        return cls(tuple(texts), ends)

    @cached_property
    def decoded(self) -> tuple[list[str], dict[int, bytes]]:
        """The characters that each id completes where a text begins with it, [V], and what it leaves open.

        That is the bytes of an incomplete character, of each id that ends with one.
        """
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
        """Return how one token can continue an incomplete character without breaking any.

        Returns:
            The characters that it completes, none if that takes further tokens, and the bytes of an
            incomplete one behind them.
        """
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
        """Return the allowed tokens [V] bool, without the idle ones where no token that adds text is allowed.

        They would fill the text up to its longest length; without them it ends, by an end or as a dead end.
        """
        return mask if bool((mask & self.speaks).any()) else mask & ~self.idle


def _characters(data: bytes) -> tuple[str, bytes] | None:
    """Return characters, and the bytes of an incomplete one behind them; None if a byte is invalid."""
    try:
        characters, used = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    return characters, data[used:]
