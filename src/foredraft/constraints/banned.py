"""Banned text, in two modes whose outputs have different distributions (docs/guides/constraints.md); lists of
it are kept.

`mask`: a token that would complete a banned phrase has probability 0. `rollback`: when a phrase is complete,
the text is cut before the token with the phrase's first byte, that token is forbidden after exactly this
text, and drawing goes on with new noise. Both look at text, so no tokenisation of a phrase slips through.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.constraints.phrases import BOUNDARY, PhraseAutomaton, PhraseState, Symbols
from foredraft.constraints.shared_cache import KEPT_BYTES, KEPT_LISTS, LRUCache, caching
from foredraft.constraints.token_masks import TokenMasks, TokenTable
from foredraft.decode.constraint import Constraint
from foredraft.decode.params import SamplingParams
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer

KEPT_MOVES = 1 << 16  # some 20 MB: a text makes the same moves again, and a round walks a draft twice


class Move(NamedTuple):
    """What a token does to a state."""

    state: PhraseState  # afterwards
    symbols: int  # the number that the token adds
    joined: int  # how many of them are of a character that began before the token
    waits: bool  # the token adds bytes to a character that began before it, which is still incomplete
    # the symbol with which the first complete phrase begins, counted from the first that the token adds
    found: int | None


class BanList:
    """A phrase automaton over a vocabulary; sequences share it."""

    def __init__(self, phrases: PhraseAutomaton, table: TokenTable) -> None:
        self.phrases, self.table = phrases, table
        self.read: Callable[..., Move] = caching(self._move, KEPT_MOVES)

    @cached_property
    def masks(self) -> TokenMasks:
        return TokenMasks(self.phrases, self.table)

    def _move(self, state: PhraseState, token: int, last: bool = False) -> Move:
        """Return the move of a token; last: the text ends with it."""
        phrases, (node, begun) = self.phrases, state
        text = self.table.texts[token]
        symbols, pending = phrases.decoded(begun, text)
        joined, waits = 0, bool(begun) and not symbols
        if begun and symbols:
            joined = len(phrases.symbols.of((begun + text).decode("utf-8", "replace")[0]))
        if last or token in self.table.ends:
            symbols += phrases.symbols.edge
        state = PhraseState(phrases.walk(node, symbols), pending)
        return Move(state, len(symbols), joined, waits, phrases.search(node, symbols))

    @cached_property
    def speaks_safely(self) -> bool:
        """Whether some token with text can never be forbidden by a rollback: it begins no phrase."""
        first = {pattern.lstrip(BOUNDARY)[0] for pattern in self.phrases.patterns}
        for id in self.table.speaks.nonzero()[:, 0].tolist():
            symbols, pending = self.phrases.decoded(b"", self.table.texts[id])
            if not pending and not first.intersection(symbols):
                return True
        return False


NO_TOKEN = "ban: every token would complete banned text"
# Tokens that a text may take back for each of `max_new_tokens`, or of 64 where those are fewer: with dead
# ends, a text takes nine times the rounds of its longest length at most.
TAKEN_BACK, MIN_TAKEN_BACK = 4, 64


class _Step(NamedTuple):
    """Where a text stands after some tokens."""

    state: PhraseState  # of the automaton
    symbols: int  # of all these tokens
    begun: int  # the token with the first byte of an incomplete character; -1 where it is in the prompt


class _Ban(Constraint):
    """A ban that follows a text by the automaton's state after every new token."""

    narrow, option = False, "ban"

    def __init__(self, banned: BanList, start: PhraseState, last: int) -> None:
        super().__init__()
        self._banned, self._last = banned, last  # the text ends with so many new tokens
        self._steps = [_Step(start, 0, -1 if start.pending else 0)]  # after n tokens
        self._owners: list[int] = []  # the token with the first byte of each symbol; -1: it is in the prompt

    def push(self, token: int) -> int | None:
        """Read a token; return the token with which a phrase that is complete begins, None without one."""
        index, (state, symbols, begun) = self.length, self._steps[-1]
        move = self._banned.read(state, token, index + 1 == self._last)
        self.tokens.append(token)
        self._owners += [begun] * move.joined + [index] * (move.symbols - move.joined)
        self._steps.append(_Step(move.state, len(self._owners), begun if move.waits else index))
        return None if move.found is None else self._owner(symbols + move.found)

    def rewind(self, length: int) -> None:
        del self.tokens[length:], self._steps[length + 1 :]
        del self._owners[self._steps[-1].symbols :]

    def _owner(self, symbol: int) -> int:
        """Return the index of the token with the first byte of a symbol; 0 for one of the prompt."""
        return max(0, self._owners[symbol]) if symbol >= 0 else 0

    def awaits_boundary(self) -> int | None:
        """Return the first token of a phrase that the end of the text would complete; None without one."""
        state, symbols, _ = self._steps[-1]
        phrases = self._banned.phrases
        found = phrases.search(state.node, phrases.symbols.edge)
        return None if found is None else self._owner(symbols + found)

    def may_be_cut(self) -> int:
        open_phrase = self.awaits_boundary()
        return self.length if open_phrase is None else open_phrase


class BannedByMask(_Ban):
    """Forbids tokens that complete a phrase."""

    def mask(self) -> Tensor | None:
        left = max(0, self._last - self.length - 1)  # tokens that may follow the next one
        return self._banned.masks.allowed(self._steps[-1].state, left)

    def advance(self, token: int) -> int:
        self.push(token)
        return self.length

    def settled(self) -> int:
        return self.may_be_cut()

    def retreat(self) -> int | None:
        self.ended_by = NO_TOKEN
        return self.awaits_boundary()  # a whole word must not stand at the end


class BannedByRollback(_Ban):
    """Takes back phrases that are complete."""

    takes_back = True

    def __init__(self, banned: BanList, start: PhraseState, last: int, most: int, *, holds_all: bool) -> None:
        super().__init__(banned, start, last)
        self._most, self._holds_all = most, holds_all
        self._forbidden: dict[int, set[int]] = {}  # length of the text -> tokens that may not follow it
        self._rollbacks = self._taken_back = 0
        self._most_taken_back = TAKEN_BACK * max(last, MIN_TAKEN_BACK)

    def mask(self) -> Tensor | None:
        forbidden, table = self._forbidden.get(self.length), self._banned.table
        if not forbidden:
            return None
        mask = torch.ones(len(table.texts), dtype=torch.bool)
        mask[list(forbidden)] = False
        return table.without_idle(mask)

    def advance(self, token: int) -> int:
        first = self.push(token)
        return self.length if first is None else first

    def roll_back(self, length: int) -> None:
        token = self.tokens[length]
        self._taken_back += self.length - length
        self.rewind(length)
        self._forbidden = {at: tokens for at, tokens in self._forbidden.items() if at <= length}
        self._forbidden.setdefault(length, set()).add(token)
        self._rollbacks += 1
        if self._rollbacks > self._most:
            self.ended_by = f"ban: banned text came up more than {self._most} times"
        elif self._taken_back > self._most_taken_back:
            self.ended_by = f"ban: more than {self._most_taken_back} tokens were taken back"

    def retreat(self) -> int | None:
        if self.length == 0:
            self.ended_by = NO_TOKEN
            return None
        return self.length - 1

    def settled(self) -> int:
        """Return the leading tokens that no phrase can take back; an open one takes all from its first."""
        length = 0 if self._holds_all else self.length
        while (first := self._first_open(length)) < length:
            length = first
        return length

    def _first_open(self, length: int) -> int:
        """Return the first of `length` tokens that may hold an open phrase's beginning; `length` for none."""
        phrases, (state, symbols, begun) = self._banned.phrases, self._steps[length]
        is_open = phrases.depth[state.node] - phrases.symbols.whole_words
        first = self._owner(symbols - is_open) if is_open > 0 else length
        return max(0, min(first, begun)) if state.pending else first


class Bans:
    """Makes the bans of requests to one model."""

    def __init__(self, tokenizer: Tokenizer, codec: ByteCodec, vocabulary: int) -> None:
        self._tokenizer, self._codec, self._vocabulary = tokenizer, codec, vocabulary
        self._table = caching(self._make_table, 4)
        self.lists = LRUCache[Hashable, BanList](KEPT_LISTS, KEPT_BYTES)

    def maker(
        self, prompt: list[int], params: SamplingParams, ends: frozenset[int], show_special: bool
    ) -> Callable[[], Constraint]:
        """Return a function that makes the ban of each sequence; what they share is made here."""
        stops = () if params.include_stop else tuple(params.stop)
        symbols = Symbols(ignore_case=params.ban_ignore_case, whole_words=params.ban_whole_words)
        asked = tuple(params.ban), params.ban_ignore_case, params.ban_whole_words, stops, ends, show_special
        size = sum(len(text.encode()) for text in (*params.ban, *stops))

        def made() -> BanList:
            return BanList(PhraseAutomaton(params.ban, symbols, stops), self._table(ends, show_special))

        banned = self.lists.get(asked, size, made)
        start, last = banned.phrases.start, params.max_new_tokens
        if params.ban_prompt:
            start = self._prompt_state(banned, prompt, show_special)
        if params.ban_mode == "mask":
            return lambda: BannedByMask(banned, start, last)
        may_end = bool(ends) and not params.min_new_tokens
        holds_all = params.text_grammar is not None or not (may_end or banned.speaks_safely)
        return lambda: BannedByRollback(banned, start, last, params.ban_rollbacks, holds_all=holds_all)

    def _make_table(self, ends: frozenset[int], show_special: bool) -> TokenTable:
        texts = self._codec.table(self._vocabulary)
        for content, id in self._codec.specials.items() if show_special else ():
            if id < self._vocabulary:
                texts[id] = content.encode()
        return TokenTable(tuple(texts), ends)

    def _prompt_state(self, banned: BanList, prompt: list[int], show_special: bool) -> PhraseState:
        """Return the automaton's state after as much of the prompt's end as a phrase may span."""
        text, reach = b"", 4 * max(map(len, banned.phrases.patterns)) + 4
        for token in reversed(prompt):
            is_cut = not show_special and token in self._tokenizer.special
            if is_cut or len(text) >= reach:
                break
            text = banned.table.texts[token] + text
        return banned.phrases.after(text)
