"""Provenance: the source of each token of a sample, and the rounds behind it, as the API shows them.

Each token has one entry, with the text that it completed; joined, these texts are the text of the sample. In
a stream an entry comes once its text cannot grow: with the text of a later token, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from foredraft.decode.trace import RoundTrace
from foredraft.llm.output import Output, Piece

__all__ = ["Provenance", "whole_provenance"]

Shown = Callable[[int], str]


class Provenance:
    """The provenance of one sample, while it streams.

    Args:
        shown: Returns the text of a single token, for people.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._entries: list[dict[str, Any]] = []
        self._sent = 0

    def fields(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the fields of a chunk: the entries that have become complete, and the rounds."""
        final, rounds = self._sent, []
        for piece in pieces:
            plain = None if piece.parts is None else ""
            self._entries += map(_entry, piece.token_ids, piece.origins, [plain] * len(piece.token_ids))
            for index, text in piece.parts or ():
                self._entries[index]["text"] += text
                final = index  # the last token with text may get more
            if piece.parts is None or piece.output is not None:
                final = len(self._entries)
            rounds += [_round(trace, self._shown) for trace in piece.trace or ()]
        entries, self._sent = self._entries[self._sent : final], final
        return {"provenance": entries, "trace": rounds}


def whole_provenance(output: Output, shown: Shown) -> dict[str, Any]:
    """Return the same fields for a whole reply."""
    texts: Iterable[str | None] = [None] * len(output.token_ids) if output.pieces is None else output.pieces
    return {
        "provenance": list(map(_entry, output.token_ids, output.origins, texts)),
        "trace": [_round(trace, shown) for trace in output.trace or ()],
    }


def _entry(token: int, origin: str, text: str | None) -> dict[str, Any]:
    return {"token_id": token, "origin": origin, "text": text}


def _round(trace: RoundTrace, shown: Shown) -> dict[str, Any]:
    """Return a round with the texts of its tokens; those that were rejected are in no other field."""
    texts = {"draft_texts": [shown(token) for token in trace.draft], "next_text": shown(trace.next_token)}
    return asdict(trace) | texts
