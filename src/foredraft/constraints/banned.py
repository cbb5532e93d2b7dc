"""Banned text, in two modes whose outputs have different distributions (docs/guides/constraints.md).

`mask`: a token that would complete a banned phrase, or begin a character that only such tokens complete, has
probability 0, and each step is renormalised over the others. `rollback`: tokens are drawn freely; when a
phrase is complete, the text is cut before the token with the phrase's first byte, that token is forbidden
after exactly this text, and drawing goes on with new noise.
Both look at text, so no tokenisation of a phrase slips through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.track import PhraseTrack
from foredraft.decode.constraint import Constraint

__all__ = ["BannedByMask", "BannedByRollback"]

NO_TOKEN = "ban: every token would complete banned text"
# Tokens that a text may take back in all: so many for each of `max_new_tokens`, or of 64 where those are
# fewer. A dead end costs a round, too, so a text takes nine times the rounds of its longest length at most.
TAKEN_BACK, MIN_TAKEN_BACK = 4, 64


class BannedByMask(Constraint):
    """Forbids tokens that complete a phrase.

    Args:
        masks: Of the vocabulary, by states of the automaton; sequences share them.
        track: The automaton along this sequence.
    """

    narrow, option = False, "ban"

    def __init__(self, masks: TokenMasks, track: PhraseTrack) -> None:
        self._masks, self._track = masks, track

    @property
    def length(self) -> int:
        return len(self._track.tokens)

    def mask(self) -> Tensor | None:
        return self._masks.allowed(self._track.state, self._track.left)

    def advance(self, token: int) -> int:
        self._track.push(token)
        return self.length

    def rewind(self, length: int) -> None:
        self._track.rewind(length)

    def settled(self) -> int:
        return self._track.may_be_cut()

    def may_be_cut(self) -> int:
        return self._track.may_be_cut()

    def retreat(self) -> int | None:
        self.ended_by = NO_TOKEN
        return self._track.awaits_boundary()  # a whole word must not stand at the end


class BannedByRollback(Constraint):
    """Takes back phrases that are complete.

    Args:
        track: The automaton along this sequence.
        vocabulary: Size V.
        most: Rollbacks before the text ends.
        holds_all: No token is settled before the end, because a place may run out of tokens: then the token
            before it, which may have begun no phrase, is taken back, too.
    """

    narrow, option = False, "ban"

    def __init__(self, track: PhraseTrack, vocabulary: int, most: int, *, holds_all: bool) -> None:
        self._track, self._vocabulary, self._most, self._holds_all = track, vocabulary, most, holds_all
        self._forbidden: dict[int, set[int]] = {}  # length of the text -> tokens that may not follow it
        self._rollbacks = self._taken_back = 0
        self._most_taken_back = TAKEN_BACK * max(track.last, MIN_TAKEN_BACK)

    @property
    def length(self) -> int:
        return len(self._track.tokens)

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

    def rewind(self, length: int) -> None:
        self._track.rewind(length)

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

    def may_be_cut(self) -> int:
        return self._track.may_be_cut()
