"""TokenMasks: the tokens that complete no banned phrase, for every state of a phrase automaton.

A token completes a phrase where a phrase lies within the token (the same tokens in every state), or where the
text ends with the beginning of a phrase and the token starts with its remainder: a range of the vocabulary
sorted by symbols, for every suffix of the state and every phrase that begins with it. So the mask of a state
that was never seen costs a few range look-ups, not a walk over the vocabulary; it is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.constraints.phrases import BOUNDARY, ROOT, PhraseAutomaton, State
from foredraft.constraints.token_table import TokenTable

__all__ = ["TokenMasks"]

KEPT_BYTES = 64 << 20  # of masks; a text visits the same few states again and again
EAGER = (
    64  # phrases below a node from which on its ranges are looked up at once: a millisecond has about 1,000
)
CONTINUATION = range(0x80, 0xC0)  # first bytes of tokens that may complete a character

Ids = npt.NDArray[np.int64]


class TokenMasks:
    """Masks of a vocabulary by the states of an automaton.

    Args:
        automaton: Finds the phrases.
        table: The vocabulary.
    """

    def __init__(self, automaton: PhraseAutomaton, table: TokenTable) -> None:
        self.automaton, self.table = automaton, table
        size = len(table.texts)
        closing = automaton.symbols.whole_words
        decoded = [automaton.decoded(b"", text) for text in table.texts]
        streams = [symbols for symbols, _ in decoded]
        if closing:
            for id in table.ends:
                streams[id] = BOUNDARY
        self._order = np.array(sorted(range(size), key=streams.__getitem__), dtype=np.int64)
        self._sorted = [streams[id] for id in self._order]
        self._within = np.zeros(size, dtype=bool)  # a phrase lies within the token
        self._within_last = np.zeros(size, dtype=bool)  # or between its beginning and the end of the text
        shortest = min(map(len, automaton.patterns)) - closing
        for id, (stream, (_, pending)) in enumerate(zip(streams, decoded, strict=True)):
            if len(stream) < shortest:
                continue
            self._within[id] = automaton.completes(ROOT, stream)
            if closing:
                self._within_last[id] = automaton.completes(ROOT, stream + automaton.end_symbols(pending))
        self._continuing = [id for id, text in enumerate(table.texts) if text and text[0] in CONTINUATION]
        self._silent = np.array([not text for text in table.texts])
        self._ranges: dict[tuple[int, bool], Ids] = {}
        self._masks: dict[tuple[State, bool], Tensor] = {}
        self._most = max(256, KEPT_BYTES // size)
        self._spans = _spans(automaton)
        for node, (first, stop) in enumerate(self._spans):
            if node != ROOT and stop - first >= EAGER:
                self._starting(node, False)

    def allowed(self, state: State, last: bool = False) -> Tensor:
        """Return the tokens that complete no phrase after `state`, [V] bool; it must not be written to.

        Args:
            state: Of the automaton.
            last: The text ends with the token. It makes a difference for whole words.
        """
        key = state, last and self.automaton.symbols.whole_words
        mask = self._masks.get(key)
        if mask is None:
            if len(self._masks) >= self._most:
                self._masks.clear()
            mask = self._masks[key] = torch.from_numpy(~self._forbidden(*key))
        return mask

    def _forbidden(self, state: State, last: bool) -> npt.NDArray[np.bool_]:
        if state.pending:
            return self._forbidden_mid_character(state, last)
        forbidden = (self._within | self._within_last) if last else self._within.copy()
        for node in self.automaton.suffixes(state.node):
            forbidden[self._starting(node, False)] = True
            if last:
                forbidden[self._starting(node, True)] = True
        return forbidden

    def _forbidden_mid_character(self, state: State, last: bool) -> npt.NDArray[np.bool_]:
        """Return the forbidden tokens where the text ends within a character."""
        automaton, texts = self.automaton, self.table.texts
        node, broken = state.node, automaton.symbols.of(state.pending.decode("utf-8", "surrogateescape"))
        if automaton.completes(node, broken):
            forbidden = np.ones(len(texts), dtype=bool)
        else:
            forbidden = self._forbidden(State(automaton.walk(node, broken)), last)
        ends = automaton.completes(state.node, automaton.end_symbols(state.pending))
        forbidden[self._silent] = last and ends
        for id in self.table.ends:
            forbidden[id] = automaton.symbols.whole_words and ends
        for id in self._continuing:
            symbols, pending = automaton.decoded(state.pending, texts[id])
            forbidden[id] = automaton.completes(
                state.node, symbols + (automaton.end_symbols(pending) if last else "")
            )
        return forbidden

    def _starting(self, node: int, whole: bool) -> Ids:
        """Return the tokens that start with the remainder of a pattern after `node`.

        Args:
            node: Of the automaton.
            whole: Instead, those that are the remainder but for the boundary that the end of a text adds.
        """
        found = self._ranges.get((node, whole))
        if found is None:
            (first, stop), depth = self._spans[node], self.automaton.depth[node]
            remainders = {pattern[depth:] for pattern in self.automaton.patterns[first:stop]} - {""}
            ranges = [self._equal(each) if whole else self._prefixed(each) for each in remainders]
            parts = [self._order[low:high] for low, high in ranges if low < high]
            found = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
            self._ranges[node, whole] = found
        return found

    def _prefixed(self, start: str) -> tuple[int, int]:
        """Return the range of the sorted vocabulary that starts with `start`."""
        low = bisect_left(self._sorted, start)
        if low == len(self._sorted) or not self._sorted[low].startswith(start):
            return 0, 0
        return low, bisect_left(self._sorted, start[:-1] + chr(ord(start[-1]) + 1), low)

    def _equal(self, remainder: str) -> tuple[int, int]:
        if not remainder.endswith(BOUNDARY):
            return 0, 0
        text = remainder[:-1]
        return bisect_left(self._sorted, text), bisect_right(self._sorted, text)


def _spans(automaton: PhraseAutomaton) -> list[tuple[int, int]]:
    """Return each node's range of the sorted patterns: those that begin as the node does."""
    spans = [(0, 0)] * len(automaton.depth)
    for place, pattern in enumerate(automaton.patterns):
        for node in automaton.path(pattern):
            spans[node] = (place if spans[node] == (0, 0) else spans[node][0]), place + 1
    return spans
