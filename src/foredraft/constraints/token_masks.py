"""TokenMasks: the tokens that lead to no banned phrase, for every state of a phrase automaton; the bytes that
every token adds to a text.

A token completes a phrase where a phrase lies within it, or where it starts with the remainder of a phrase
that the text ends with: a range of the vocabulary sorted by symbols. So the mask of a new state costs a few
range look-ups. A token may leave a character open only if tokens can complete it without a phrase.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.constraints.phrases import (
    BOUNDARY,
    ROOT,
    PhraseAutomaton,
    PhraseState,
    cased_characters,
    code_points,
    missing_bytes,
    word_characters,
)
from foredraft.constraints.shared_cache import caching

CONTINUATION = range(0x80, 0xC0)  # first bytes of tokens that may complete a character
KEPT_COMPLETABLE = 1 << 16  # states of which it is known whether tokens can complete the open character
KEPT_BYTES = 64 << 20  # of masks: a text visits the same few states again and again
OTHER = "\ud801"  # a lone surrogate, in no text: all symbols that no pattern has, which lead to one node
SYMBOLS, SYMBOL_BITS = 0x110000, 21  # a symbol is a code point: there are so many, of so many bits
SORT_KEYS, SYMBOLS_IN_A_KEY = 2, 3  # streams are sorted by two int64 of three symbols, then as text
FAR = 4  # tokens before the end of a text where it does not matter: three complete any open character

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenTable:
    texts: tuple[bytes, ...]  # [V] the bytes that each id adds to a text; empty where it shows none
    ends: frozenset[int] = frozenset()  # ids that end a text

    @cached_property
    def decoded(self) -> tuple[list[str], dict[int, bytes]]:
        """The characters that each id completes by itself, [V], and the bytes that some ids leave open."""
        decoded = [codecs.utf_8_decode(text, "replace", False) for text in self.texts]
        uses = enumerate(zip(self.texts, decoded, strict=True))
        pending = {id: text[used:] for id, (text, (_, used)) in uses if used < len(text)}
        return [characters for characters, _ in decoded], pending

    @cached_property
    def silent(self) -> Tensor:
        """Whether an id adds no text, [V] bool."""
        lengths = np.fromiter(map(len, self.texts), dtype=np.int64, count=len(self.texts))
        return torch.from_numpy(lengths == 0)

    @cached_property
    def is_end(self) -> Tensor:
        """Whether an id ends a text, [V] bool."""
        is_end = torch.zeros(len(self.texts), dtype=torch.bool)
        is_end[[id for id in self.ends if id < len(self.texts)]] = True
        return is_end

    @cached_property
    def speaks(self) -> Tensor:
        """Whether an id adds text and is no end, [V] bool."""
        return ~(self.silent | self.is_end)

    def without_idle(self, mask: Tensor) -> Tensor:
        """Return the allowed tokens [V] bool; those that would let a text stand still only beside others."""
        return mask if bool((mask & self.speaks).any()) else mask & (self.is_end | ~self.silent)

    @cached_property
    def continuing(self) -> list[int]:
        """Ids whose text begins with a continuation byte."""
        return [id for id, text in enumerate(self.texts) if text and text[0] in CONTINUATION]

    @cached_property
    def has_all_continuations(self) -> bool:
        """Whether tokens of one byte can complete every character, as in all byte-level vocabularies."""
        return {bytes([byte]) for byte in CONTINUATION} <= {self.texts[id] for id in self.continuing}

    @cached_property
    def completions(self) -> Callable[[bytes], set[tuple[str, bytes]]]:
        """Returns how one token can continue an incomplete character without breaking any."""
        return caching(self._found_completions)

    def _found_completions(self, pending: bytes) -> set[tuple[str, bytes]]:
        pairs = set[tuple[str, bytes]]()
        for data in {pending + self.texts[id] for id in self.continuing}:
            with suppress(UnicodeDecodeError):
                characters, used = codecs.utf_8_decode(data, "strict", False)
                pairs.add((characters, data[used:]))
        return pairs


class TokenMasks:
    def __init__(self, automaton: PhraseAutomaton, table: TokenTable) -> None:
        self.automaton, self.table = automaton, table
        size = len(table.texts)
        closing = automaton.symbols.whole_words
        characters, pending = table.decoded
        streams = automaton.symbols.of_each(characters)
        opening: dict[tuple[str, bytes], list[int]] = {}
        for id, rest in pending.items():
            opening.setdefault((streams[id], rest), []).append(id)
        self._opening = {key: np.array(ids, dtype=np.int64) for key, ids in opening.items()}
        if closing:
            for id in table.ends:
                streams[id] = BOUNDARY
        codes, ends = _codes(streams)
        order = sorted(_nearly_sorted(codes, ends), key=streams.__getitem__)
        self._order = np.array(order, dtype=np.int64)
        self._sorted = [streams[id] for id in order]
        self._within = np.zeros(size, dtype=bool)  # a phrase lies within the token
        self._within_last = np.zeros(size, dtype=bool)  # or between its beginning and the end of the text
        shortest = min(map(len, automaton.patterns)) - closing
        for id in _where_patterns_may_begin(codes, ends, automaton.patterns):
            stream = streams[id]
            if len(stream) < shortest:
                continue
            self._within[id] = automaton.completes(ROOT, stream)
            if closing:
                self._within_last[id] = automaton.completes(ROOT, stream + BOUNDARY)
        self._silent = table.silent.numpy()
        self._starting, self._becomes = caching(self._found_starting), caching(self._found_symbols)
        self._mask = caching(self._made, max(256, KEPT_BYTES // size))
        self._named = self._named_by_patterns()
        self._completable: dict[tuple[PhraseState, int], bool] = {}

    def allowed(self, state: PhraseState, left: int = FAR) -> Tensor:
        """Return the tokens that lead to no phrase after `state`, [V] bool; it must not be written to."""
        return self._mask(state, min(left, FAR))

    def _made(self, state: PhraseState, left: int) -> Tensor:
        if len(self._completable) >= KEPT_COMPLETABLE:
            self._completable.clear()
        return self.table.without_idle(torch.from_numpy(~self._forbidden(state, left)))

    def _forbidden(self, state: PhraseState, left: int) -> npt.NDArray[np.bool_]:
        if state.pending:
            return self._forbidden_mid_character(state, left)
        forbidden = self._within.copy() if left else (self._within | self._within_last)
        node = state.node
        while node != ROOT:  # each suffix of the text that begins a pattern
            forbidden[self._starting(node, False)] = True
            if not left:
                forbidden[self._starting(node, True)] = True
            node = self.automaton.fallback[node]
        for (symbols, pending), ids in self._opening.items():
            can_always = self.table.has_all_continuations and missing_bytes(pending) <= left
            if can_always and OTHER in self._becomes(pending):  # in any state, one that no pattern has
                continue
            if not self._can_complete(PhraseState(self.automaton.walk(state.node, symbols), pending), left):
                forbidden[ids] = True
        return forbidden

    def _forbidden_mid_character(self, state: PhraseState, left: int) -> npt.NDArray[np.bool_]:
        """Return the forbidden tokens where the text ends within a character."""
        automaton, texts = self.automaton, self.table.texts
        node, broken = state.node, automaton.symbols.of(state.pending.decode("utf-8", "replace"))
        if automaton.completes(node, broken):
            forbidden = np.ones(len(texts), dtype=bool)
        else:
            forbidden = self._forbidden(PhraseState(automaton.walk(node, broken)), left)
        ends = automaton.completes(node, automaton.symbols.edge)
        forbidden[self._silent] = ends and not left
        for id in self.table.ends:
            if not texts[id]:
                forbidden[id] = ends
        for id in self.table.continuing:
            forbidden[id] = not self._may_continue(state, *automaton.decoded(state.pending, texts[id]), left)
        return forbidden

    def _may_continue(self, state: PhraseState, symbols: str, pending: bytes, left: int) -> bool:
        automaton = self.automaton
        if automaton.completes(state.node, symbols + ("" if left else automaton.symbols.edge)):
            return False
        return not pending or self._can_complete(
            PhraseState(automaton.walk(state.node, symbols), pending), left
        )

    def _can_complete(self, state: PhraseState, left: int) -> bool:
        """Return whether tokens can complete the open character at the end of a text, or the text is over."""
        if not left:
            return True
        key = state, left
        if key not in self._completable:
            # tokens that each complete one character and open the next may go in a circle, which never ends
            self._completable[key] = True
            self._completable[key] = self._finds_completion(state, left)
        return self._completable[key]

    def _finds_completion(self, state: PhraseState, left: int) -> bool:
        automaton, node = self.automaton, state.node
        is_legal = not all(automaton.completes(node, symbols) for symbols in self._becomes(state.pending))
        if left == FAR and (not is_legal or self.table.has_all_continuations):
            return is_legal
        if not is_legal and automaton.completes(node, automaton.symbols.edge):
            return False
        after = left if left == FAR else left - 1
        return any(
            self._may_continue(state, automaton.symbols.of(text), rest, after)
            for text, rest in self.table.completions(state.pending)
        )

    def _found_symbols(self, pending: bytes) -> list[str]:
        """Return the symbols of all characters that an incomplete one can become; OTHER for unnamed ones."""
        points, symbols = code_points(pending), self.automaton.symbols
        named = [code for code in self._named if code in points]
        found = [symbols.of(chr(code)) for code in named]
        if symbols.whole_words:
            words = word_characters()[points.start : points.stop]
            words = np.delete(words, [code - points.start for code in named])
            found += [OTHER] if words.any() else []
            found += [] if words.all() else [f"{BOUNDARY}{OTHER}{BOUNDARY}"]
        elif len(points) > len(named):
            found.append(OTHER)
        return found

    def _named_by_patterns(self) -> list[int]:
        """Return the code points of all characters whose symbols a pattern has."""
        symbols = self.automaton.symbols
        named = {symbol for pattern in self.automaton.patterns for symbol in pattern} - {BOUNDARY}
        if symbols.ignore_case:
            named |= {each for each in cased_characters() if symbols.of(each).strip(BOUNDARY) in named}
        return sorted(map(ord, named))

    def _found_starting(self, node: int, whole: bool) -> Ids:
        """Return the tokens that start with the remainder of a pattern after `node`."""
        automaton, below = self.automaton, self.automaton.below[node]
        patterns, depth = automaton.patterns[below.start : below.stop], automaton.depth[node]
        remainders = {pattern[depth:] for pattern in patterns} - {""}
        if whole:
            remainders = {each[:-1] for each in remainders if each.endswith(BOUNDARY)}
        parts = [self._order[self._range(each, whole)] for each in remainders]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _range(self, start: str, whole: bool) -> slice:
        """Return which part of the sorted vocabulary starts with a text, or is that text as a whole."""
        low, length = bisect_left(self._sorted, start), len(start)
        key = None if whole else lambda stream: stream[:length]
        return slice(low, bisect_right(self._sorted, start, low, key=key))


def _codes(streams: list[str]) -> tuple[npt.NDArray[np.uint32], Ids]:
    """Return the codes of all symbols of streams, one stream after the other, and where each one ends [V]."""
    codes = np.frombuffer("".join(streams).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return codes, np.cumsum(np.fromiter(map(len, streams), dtype=np.int64, count=len(streams)))


def _nearly_sorted(codes: npt.NDArray[np.uint32], ends: Ids) -> list[int]:
    """Return all ids by the first symbols of their streams, then by id; the rest of a sort is short."""
    padded = np.concatenate([codes.astype(np.int64) + 1, [0]])
    places = np.concatenate([[0], ends[:-1]])[:, None] + np.arange(SORT_KEYS * SYMBOLS_IN_A_KEY)
    symbols = np.where(places < ends[:, None], padded[np.minimum(places, len(codes))], 0)
    bits = SYMBOL_BITS * np.arange(SYMBOLS_IN_A_KEY)[::-1]
    keys = (symbols.reshape(-1, SORT_KEYS, SYMBOLS_IN_A_KEY) << bits).sum(-1)
    ids: list[int] = np.lexsort(keys.T[::-1]).tolist()
    return ids


def _where_patterns_may_begin(codes: npt.NDArray[np.uint32], ends: Ids, patterns: Seq[str]) -> list[int]:
    """Return the ids whose streams may hold a pattern, by its first two symbols; few need a walk."""
    firsts = np.zeros(SYMBOLS, dtype=bool)
    firsts[[ord(pattern[0]) for pattern in patterns]] = True
    at = np.flatnonzero(firsts[codes])
    if min(map(len, patterns)) > 1:
        at = at[at + 1 < len(codes)]
        begun = codes[at].astype(np.int64) << SYMBOL_BITS | codes[at + 1]
        wanted = {ord(pattern[0]) << SYMBOL_BITS | ord(pattern[1]) for pattern in patterns}
        at = at[np.isin(begun, [*wanted])]
    ids: list[int] = np.unique(np.searchsorted(ends, at, side="right")).tolist()
    return ids
