"""PhraseTrack: a phrase automaton along the tokens of one sequence, and which token began what it sees."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from foredraft.constraints.phrases import PhraseAutomaton, PhraseState
from foredraft.constraints.token_automaton import TokenAutomaton

__all__ = ["PhraseTrack", "prompt_state"]


class _Step(NamedTuple):
    """Where a text stands after some tokens.

    Attributes:
        state: Of the automaton.
        emitted: Symbols of all these tokens.
        begun: The token with the first byte of an incomplete character; -1 where it is in the prompt.
        joined: Symbols of the character that the last token completed.
    """

    state: PhraseState
    emitted: int
    begun: int
    joined: int


class PhraseTrack:
    """The automaton's state after every new token.

    Args:
        automaton: Finds the phrases.
        start: The state before the first new token.
        last: The number of new tokens with which the text ends at the latest.

    Attributes:
        last: As given.
        tokens: New tokens read.
    """

    def __init__(self, automaton: TokenAutomaton, start: PhraseState, last: int) -> None:
        self.automaton, self.last = automaton, last
        self.tokens: list[int] = []
        self._steps = [_Step(start, 0, -1 if start.pending else 0, 0)]  # after n tokens

    @property
    def state(self) -> PhraseState:
        return self._steps[-1].state

    @property
    def left(self) -> int:
        """Tokens that may follow the next one."""
        return max(0, self.last - len(self.tokens) - 1)

    def push(self, token: int) -> int | None:
        """Read a token.

        Returns:
            The index of the new token with the first byte of the phrase that is complete now, -1 where it
            lies in the prompt; None where no phrase is. Of several phrases, the one that began last counts.
        """
        index, (state, emitted, begun, _) = len(self.tokens), self._steps[-1]
        move = self.automaton.read(state, token, index + 1 == self.last)
        self.tokens.append(token)
        self._steps.append(
            _Step(move.state, emitted + move.symbols, begun if move.waits else index, move.joined)
        )
        return None if move.found is None else self._owner(emitted + move.found)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        del self._steps[length + 1 :]

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
        phrases, (state, emitted, begun, _) = self.automaton.phrases, self._steps[length]
        symbols = phrases.depth[state.node] - phrases.symbols.whole_words
        first = length
        if symbols > 0:
            first = max(0, self._owner(emitted - symbols))
        return max(0, min(first, begun)) if state.pending else first

    def awaits_boundary(self) -> int | None:
        """Return the first token of a phrase that the end of the text would complete; None without one."""
        state, emitted, *_ = self._steps[-1]
        found = self.automaton.found_at_end(state)
        return None if found is None else max(0, self._owner(emitted + found))

    def may_be_cut(self) -> int:
        """Return the leading tokens that may stand alone: no phrase is complete at their end."""
        open_phrase = self.awaits_boundary()
        return len(self.tokens) if open_phrase is None else open_phrase

    def _owner(self, symbol: int) -> int:
        """Return the index of the token with the first byte of a symbol; -1 for one of the prompt."""
        if symbol < 0:
            return -1
        index = bisect_right(self._steps, symbol, key=lambda step: step.emitted) - 1
        step = self._steps[index]
        if index < len(self.tokens) and symbol - step.emitted < self._steps[index + 1].joined:
            return step.begun
        return min(index, len(self.tokens) - 1)


def prompt_state(automaton: PhraseAutomaton, texts: list[bytes | None]) -> PhraseState:
    """Return the state after a prompt, whose special tokens (None) cut its text."""
    node, pending = automaton.start
    for text in texts:
        if text is None:
            node, pending = automaton.start
            continue
        symbols, pending = automaton.decoded(pending, text)
        node = automaton.walk(node, symbols)
    return PhraseState(node, pending)
