"""Banned text, in two modes whose outputs have different distributions (docs/guides/constraints.md).

`mask`: a token that would complete a banned phrase has probability 0. `rollback`: when a phrase is complete,
the text is cut before the token with the phrase's first byte, that token is forbidden after exactly this
text, and drawing goes on with new noise. Both look at text, so no tokenisation of a phrase slips through.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.constraints.phrases import BOUNDARY, PhraseAutomaton, PhraseTrack, Symbols, TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.decode.constraint import Constraint


class Phrases(NamedTuple):
    """Banned phrases, how they are compared, and strings at which a text may be cut off."""

    phrases: tuple[str, ...]
    ignore_case: bool
    whole_words: bool
    endings: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(len(text.encode()) for texts in (self.phrases, self.endings) for text in texts)


class BanList:
    def __init__(self, ban: Phrases, table: TokenTable) -> None:
        symbols = Symbols(ignore_case=ban.ignore_case, whole_words=ban.whole_words)
        self._phrases = PhraseAutomaton(ban.phrases, symbols, ban.endings)
        self._table = table

    @cached_property
    def automaton(self) -> TokenAutomaton:
        return TokenAutomaton(self._phrases, self._table)

    @cached_property
    def masks(self) -> TokenMasks:
        return TokenMasks(self._phrases, self._table)

    @cached_property
    def has_safe_token(self) -> bool:
        """Whether some token of text can never be forbidden by a rollback: it begins no phrase."""
        phrases, table = self._phrases, self._table
        first = {pattern.lstrip(BOUNDARY)[0] for pattern in phrases.patterns}
        for id in table.speaks.nonzero()[:, 0].tolist():
            symbols, pending = phrases.decoded(b"", table.texts[id])
            if not pending and not first.intersection(symbols):
                return True
        return False


NO_TOKEN = "ban: every token would complete banned text"
# Tokens that a text may take back for each of `max_new_tokens`, or of 64 where those are fewer: with dead
# ends, a text takes nine times the rounds of its longest length at most.
TAKEN_BACK, MIN_TAKEN_BACK = 4, 64


class _Ban(Constraint):
    """A ban that follows a text by a track of its phrases."""

    narrow, option = False, "ban"

    def __init__(self, track: PhraseTrack) -> None:
        self._track = track

    @property
    def length(self) -> int:
        return len(self._track.tokens)

    def rewind(self, length: int) -> None:
        self._track.rewind(length)

    def may_be_cut(self) -> int:
        return self._track.may_be_cut()


class BannedByMask(_Ban):
    """Forbids tokens that complete a phrase."""

    def __init__(self, masks: TokenMasks, track: PhraseTrack) -> None:
        super().__init__(track)
        self._masks = masks

    def mask(self) -> Tensor | None:
        return self._masks.allowed(self._track.state, self._track.left)

    def advance(self, token: int) -> int:
        self._track.push(token)
        return self.length

    def settled(self) -> int:
        return self._track.may_be_cut()

    def retreat(self) -> int | None:
        self.ended_by = NO_TOKEN
        return self._track.awaits_boundary()  # a whole word must not stand at the end


class BannedByRollback(_Ban):
    """Takes back phrases that are complete."""

    def __init__(self, track: PhraseTrack, vocabulary: int, most: int, *, holds_all: bool) -> None:
        super().__init__(track)
        self._vocabulary, self._most, self._holds_all = vocabulary, most, holds_all
        self._forbidden: dict[int, set[int]] = {}  # length of the text -> tokens that may not follow it
        self._rollbacks = self._taken_back = 0
        self._most_taken_back = TAKEN_BACK * max(track.last, MIN_TAKEN_BACK)

    def mask(self) -> Tensor | None:
        forbidden = self._forbidden.get(self.length)
        if not forbidden:
            return None
        mask = torch.ones(self._vocabulary, dtype=torch.bool)
        mask[list(forbidden)] = False
        return self._track.automaton.table.without_idle(mask)

    def advance(self, token: int) -> int:
        first = self._track.push(token)
        return self.length if first is None else max(0, first)

    def roll_back(self, length: int) -> None:
        token = self._track.tokens[length]
        self._taken_back += self.length - length
        self._track.rewind(length)
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
        return 0 if self._holds_all else self._track.settled()
