"""TokenTable: the bytes that every token id adds to a text.

Constraints look at text, not at tokens, so that no other tokenisation of a text slips through. A token may
hold several characters, or a part of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.model.byte_codec import ByteCodec

__all__ = ["TokenTable"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The bytes of a model's tokens.

    Attributes:
        texts: [V] the bytes that each id adds to a text; empty where it shows none.
        ends: Ids that end a text.
    """

    texts: tuple[bytes, ...]
    ends: frozenset[int] = frozenset()

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
