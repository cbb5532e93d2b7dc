"""TokenAutomaton: a phrase automaton that reads tokens."""

from __future__ import annotations

from typing import NamedTuple

from foredraft.constraints.phrases import PhraseAutomaton, PhraseState
from foredraft.constraints.token_table import TokenTable

__all__ = ["Move", "TokenAutomaton"]

KEPT_MOVES = (
    1 << 16
)  # some 20 MB; a text makes the same few moves again and again, and a round walks a draft twice


class Move(NamedTuple):
    """What a token does to a state.

    Attributes:
        state: Afterwards.
        symbols: The number that the token adds.
        joined: How many of them are of a character that began before the token.
        waits: The token adds bytes to a character that began before it, which is still incomplete.
        found: The symbol with which the first phrase begins that is complete, counted from the first that the
            token adds; below 0 in front of it. None where no phrase is complete.
    """

    state: PhraseState
    symbols: int
    joined: int
    waits: bool
    found: int | None


class TokenAutomaton:
    """A phrase automaton over a vocabulary; sequences share it.

    Args:
        phrases: Finds the phrases.
        table: The vocabulary.
    """

    def __init__(self, phrases: PhraseAutomaton, table: TokenTable) -> None:
        self.phrases, self.table = phrases, table
        self._moves: dict[tuple[PhraseState, int, bool], Move] = {}

    def read(self, state: PhraseState, token: int, last: bool = False) -> Move:
        """Return the move of a token; last: the text ends with it."""
        key = state, token, last
        move = self._moves.get(key)
        if move is None:
            if len(self._moves) >= KEPT_MOVES:
                self._moves.clear()
            move = self._moves[key] = self._move(*key)
        return move

    def _move(self, state: PhraseState, token: int, last: bool) -> Move:
        phrases, text = self.phrases, self.table.texts[token]
        symbols, pending = phrases.decoded(state.pending, text)
        joined = len(phrases.first_symbols(state.pending, text)) if state.pending else 0
        waits = bool(state.pending) and not symbols
        if last or token in self.table.ends:
            symbols += phrases.end_symbols
        node, found = self._search(state.node, symbols)
        return Move(PhraseState(node, pending), len(symbols), joined, waits, found)

    def found_at_end(self, state: PhraseState) -> int | None:
        """Return `Move.found` of the end of the text."""
        return self._search(state.node, self.phrases.end_symbols)[1]

    def _search(self, node: int, symbols: str) -> tuple[int, int | None]:
        """Return the node after more symbols, and the symbol with which the first phrase in them begins.

        That is the first one to be complete and, of those complete at once, the one that began last.
        """
        phrases, found = self.phrases, None
        for count, symbol in enumerate(symbols, start=1):
            node = phrases.step(node, symbol)
            if found is None and (length := phrases.shortest[node]):
                found = count - length + phrases.symbols.whole_words
        return node, found
