"""Provenance: the source of each token of a sample, and the rounds behind it, as the API shows them.

Each token has one entry, with the text that it completed; joined, these texts are the text of the sample. In
a stream an entry comes once its text cannot grow: with the text of a later token, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from foredraft.decode.round_trace import RoundTrace
from foredraft.llm.output import Piece

__all__ = ["Origin", "Provenance", "Round"]


class Origin(TypedDict, closed=True):
    """The source of a token."""

    token_id: int
    origin: Literal["drafter", "target", "bonus"]
    text: str | None


class Round(TypedDict, closed=True):
    """A round of a sample, as `RoundTrace`, with the texts of its tokens."""

    start: int
    drafter: str | None
    budget: int
    draft: list[int]
    p: list[float]
    q: list[float]
    accepted: int
    next_token: int
    next_p: float
    emitted: int
    discarded: bool
    rollback: float | None
    legal: list[int] | None
    after_sibling: int | None
    draft_texts: list[str]
    next_text: str
    after_text: str | None


class Provenance:
    """The provenance of one sample, while it comes.

    Args:
        shown: Returns the text of a single token, for people.
    """

    def __init__(self, shown: Callable[[int], str]) -> None:
        self._shown = shown
        self._entries: list[Origin] = []
        self._sent = 0

    def add(self, pieces: Iterable[Piece]) -> tuple[list[Origin], list[Round]]:
        """Return the entries that have become complete with further pieces, and their rounds."""
        final, rounds = self._sent, []
        for piece in pieces:
            for token, origin in zip(piece.token_ids, piece.origins, strict=True):
                text = None if piece.parts is None else ""
                self._entries.append({"token_id": token, "origin": cast(Any, origin), "text": text})
            for index, text in piece.parts or ():
                self._entries[index]["text"] = (self._entries[index]["text"] or "") + text
                final = index  # the last token with text may get more
            if piece.parts is None or piece.output is not None:
                final = len(self._entries)
            rounds += [self._round(trace) for trace in piece.trace or ()]
        entries, self._sent = self._entries[self._sent : final], final
        return entries, rounds

    def _round(self, trace: RoundTrace) -> Round:
        """Return a round with the texts of its tokens; those that were rejected are in no other field."""
        draft_texts = [self._shown(token) for token in trace.draft]
        after = None if trace.after_sibling is None else self._shown(trace.after_sibling)
        texts = {
            "draft_texts": draft_texts, "next_text": self._shown(trace.next_token), "after_text": after,
        }  # fmt: skip
        return cast(Round, asdict(trace) | texts)
