"""PhraseTrack: a phrase automaton along the tokens of one sequence, and which token began what it sees."""

from __future__ import annotations

from bisect import bisect_right

from foredraft.constraints.phrases import PhraseAutomaton, State
from foredraft.constraints.token_table import TokenTable

__all__ = ["PhraseTrack", "prompt_state"]


class PhraseTrack:
    """The automaton's state after every new token.

    Args:
        automaton: Finds the phrases.
        table: The vocabulary.
        start: The state before the first new token.
        last: The number of new tokens with which the text ends at the latest.

    Attributes:
        tokens: New tokens read.
    """

    def __init__(self, automaton: PhraseAutomaton, table: TokenTable, start: State, last: int) -> None:
        self.automaton, self.table, self._last = automaton, table, last
        self.tokens: list[int] = []
        self._states = [start]  # after n tokens
        self._symbols = [0]  # emitted by the first n tokens
        self._begun = [-1 if start.pending else 0]  # the token with the first byte of an incomplete character
        self._joined = [0]  # symbols of the character that token n - 1 completes

    @property
    def state(self) -> State:
        return self._states[-1]

    @property
    def may_end(self) -> bool:
        """Whether the next token is the last one."""
        return len(self.tokens) + 1 == self._last

    def push(self, token: int) -> int | None:
        """Read a token.

        Returns:
            The index of the new token with the first byte of the phrase that is complete now, -1 where it
            lies in the prompt; None where no phrase is. Of several phrases, the one that began last counts.
        """
        automaton, state, index = self.automaton, self.state, len(self.tokens)
        symbols, pending = automaton.decoded(state.pending, self.table.texts[token])
        joined = len(automaton.first_symbols(state.pending, self.table.texts[token])) if state.pending else 0
        waits = bool(state.pending) and not symbols
        if token in self.table.ends or index + 1 == self._last:
            symbols += automaton.end_symbols(pending)
        node, found = state.node, None
        for count, symbol in enumerate(symbols, start=1):
            node = automaton.step(node, symbol)
            if found is None and (length := automaton.shortest[node]):
                found = self._symbols[-1] + count - length + automaton.symbols.whole_words
        self.tokens.append(token)
        self._states.append(State(node, pending))
        self._symbols.append(self._symbols[-1] + len(symbols))
        self._begun.append(self._begun[-1] if waits else index)
        self._joined.append(joined)
        return None if found is None else self._owner(found)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        for history in (self._states, self._symbols, self._begun, self._joined):
            del history[length + 1 :]

    def settled(self) -> int:
        """Return the leading tokens that no phrase can take back.

        A phrase that is not complete yet may take back the text from its first token on. Then what was not
        complete in front of that token is open again.
        """
        length = len(self.tokens)
        while (first := self._first_open(length)) < length:
            length = first
        return length

    def _first_open(self, length: int) -> int:
        """Return the first of `length` tokens that may hold the beginning of a phrase that is not complete.

        Where there is none, it is `length`.
        """
        automaton, state = self.automaton, self._states[length]
        symbols = automaton.depth[state.node] - automaton.symbols.whole_words
        first = length
        if symbols > 0:
            first = max(0, self._owner(self._symbols[length] - symbols))
        return max(0, min(first, self._begun[length])) if state.pending else first

    def awaits_boundary(self) -> int | None:
        """Return the first token of a phrase that the end of the text would complete; None without one."""
        automaton, symbols = self.automaton, self._symbols[-1]
        node = self.state.node
        for count, symbol in enumerate(automaton.end_symbols(self.state.pending), start=1):
            node = automaton.step(node, symbol)
            if length := automaton.shortest[node]:
                return max(0, self._owner(symbols + count - length + automaton.symbols.whole_words))
        return None

    def _owner(self, symbol: int) -> int:
        """Return the index of the token with the first byte of a symbol; -1 for one of the prompt."""
        if symbol < 0:
            return -1
        index = bisect_right(self._symbols, symbol) - 1
        if index < len(self.tokens) and symbol - self._symbols[index] < self._joined[index + 1]:
            return self._begun[index]
        return min(index, len(self.tokens) - 1)


def prompt_state(automaton: PhraseAutomaton, texts: list[bytes | None]) -> State:
    """Return the state after a prompt, whose special tokens (None) cut its text."""
    node, pending = automaton.start
    for text in texts:
        if text is None:
            node, pending = automaton.start
            continue
        symbols, pending = automaton.decoded(pending, text)
        for symbol in symbols:
            node = automaton.step(node, symbol)
    return State(node, pending)
