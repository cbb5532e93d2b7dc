"""Banned text by its definition: plain search in the whole text at every step, without an automaton."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.constraints.banned import BannedByMask, BannedByRollback
from foredraft.constraints.phrases import PhraseAutomaton, Symbols
from foredraft.constraints.token_automaton import TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.constraints.track import PhraseTrack, prompt_state
from foredraft.decode.constraint import Constraint


@dataclass(frozen=True)
class Ban:
    """A ban over a small vocabulary."""

    texts: tuple[bytes, ...]
    phrases: tuple[str, ...]
    mode: str = "mask"
    ends: frozenset[int] = frozenset()
    last: int = 1000  # the text ends with so many new tokens
    ignore_case: bool = False
    whole_words: bool = False
    prompt: tuple[int, ...] = ()  # its text counts
    rollbacks: int = 100
    stops: tuple[str, ...] = ()

    def shipped(self) -> Constraint:
        symbols = Symbols(ignore_case=self.ignore_case, whole_words=self.whole_words)
        automaton = PhraseAutomaton(self.phrases, symbols, self.stops)
        table = TokenTable(self.texts, self.ends)
        start = automaton.start
        if self.prompt:
            start = prompt_state(automaton, [self.texts[token] for token in self.prompt])
        track = PhraseTrack(TokenAutomaton(automaton, table), start, self.last)
        if self.mode == "mask":
            return BannedByMask(TokenMasks(automaton, table), track)
        return BannedByRollback(track, len(self.texts), self.rollbacks, holds_all=True)

    def defined(self) -> Constraint:
        return ByDefinition(self) if self.mode == "mask" else RollbackByDefinition(self)

    def matches(self, tokens: list[int]) -> set[tuple[int, int]]:
        """Return (end, begin) of every banned phrase that is complete in the text, in characters.

        `end` is where it became complete: behind the phrase or, for whole words, behind its boundary.
        """
        data = b"".join(self.texts[token] for token in [*self.prompt, *tokens])
        ended = bool(tokens) and (tokens[-1] in self.ends or len(tokens) >= self.last)
        text = _decoded(data)
        found = set()
        flags = re.IGNORECASE if self.ignore_case else 0
        for phrase in self.phrases:
            for match in re.finditer(f"(?={re.escape(phrase)})", text, flags):
                begin, end = match.start(), match.start() + len(phrase)
                if not self.whole_words:
                    found.add((end, begin))
                elif (begin == 0 or not _is_word(text[begin - 1])) and (
                    not _is_word(text[end]) if end < len(text) else ended
                ):
                    found.add((end + 1, begin))
        return found

    def new_match(self, tokens: list[int]) -> int | None:
        """Return the character with which the phrase begins that the last token completes; None without one."""
        new = self.matches(tokens) - self.matches(tokens[:-1])
        if not new:
            return None
        first = min(end for end, _ in new)
        return max(begin for end, begin in new if end == first)

    def open_bytes(self, tokens: list[int]) -> bytes:
        """Return the bytes of a character at the end of the text whose last bytes are missing."""
        data = b"".join(self.texts[token] for token in [*self.prompt, *tokens])
        tails = (data[-cut:] for cut in (1, 2, 3) if cut <= len(data))
        return next((tail for tail in tails if tail[0] >= 0xC0 and _is_beginning(tail)), b"")

    def without_idle(self, allowed: list[bool]) -> Tensor:
        """Return a mask; tokens without text are allowed only beside one with text, unless they are ends."""
        ids = range(len(self.texts))
        if not any(allowed[id] and self.texts[id] and id not in self.ends for id in ids):
            allowed = [allowed[id] and (bool(self.texts[id]) or id in self.ends) for id in ids]
        return torch.tensor(allowed)

    def owner(self, tokens: list[int], character: int) -> int:
        """Return the index of the new token with a character's first byte, -1 for one of the prompt."""
        data = b"".join(self.texts[token] for token in [*self.prompt, *tokens])
        place = _first_bytes(data)[character]
        for index, token in enumerate([*self.prompt, *tokens]):
            place -= len(self.texts[token])
            if place < 0:
                return max(-1, index - len(self.prompt))
        raise AssertionError("no such character")


def _decoded(data: bytes) -> str:
    """Return the text of bytes, without a character at the end whose last bytes are missing."""
    for cut in (1, 2, 3):
        head, tail = data[:-cut], data[-cut:]
        if tail and tail[0] >= 0xC0 and _is_beginning(tail):
            return head.decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _first_bytes(data: bytes) -> list[int]:
    """Return where each character of a text begins; one is the most bytes that one U+FFFD stands for."""
    places, at = [], 0
    while at < len(data):
        places.append(at)
        rest = data[at:]
        try:
            at += len(rest.decode()[0].encode())
        except UnicodeDecodeError as error:
            at += len(rest[: error.start].decode()[0].encode()) if error.start else error.end
    return places


def _is_beginning(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@dataclass
class ByDefinition(Constraint):
    ban: Ban
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def mask(self) -> Tensor:
        ids = range(len(self.ban.texts))
        return self.ban.without_idle([self._is_legal([*self.tokens, id]) for id in ids])

    def _is_legal(self, tokens: list[int], depth: int = 0) -> bool:
        """Return whether the last token completes no phrase, and the character that it leaves open may end.

        Tokens that go round in a circle count: there is always one.
        """
        if self.ban.new_match(tokens) is not None:
            return False
        rest = self.ban.open_bytes(tokens)
        if not rest or len(tokens) >= self.ban.last or tokens[-1] in self.ban.ends or depth > 4:
            return True
        if depth == 0 and not self.ban.texts[tokens[-1]]:
            return True  # it leaves open what was open before
        return any(
            _is_utf8(rest + text) and self._is_legal([*tokens, id], depth + 1)
            for id, text in enumerate(self.ban.texts)
            if text and text[0] in range(0x80, 0xC0)
        )

    def advance(self, token: int) -> int:
        self.tokens.append(token)
        return self.length

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def retreat(self) -> int | None:
        self.ended_by = "dead end"
        ended = Ban(**{**self.ban.__dict__, "last": len(self.tokens)})
        open_words = ended.matches(self.tokens) - self.ban.matches(self.tokens)
        if not open_words:
            return None
        first = min(end for end, _ in open_words)
        begin = max(begin for end, begin in open_words if end == first)
        return max(0, self.ban.owner(self.tokens, begin))


@dataclass
class RollbackByDefinition(Constraint):
    ban: Ban
    tokens: list[int] = field(default_factory=list)
    forbidden: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    count: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def mask(self) -> Tensor:
        forbidden = self.forbidden.get(tuple(self.tokens), set())
        return self.ban.without_idle([id not in forbidden for id in range(len(self.ban.texts))])

    def advance(self, token: int) -> int:
        self.tokens.append(token)
        begin = self.ban.new_match(self.tokens)
        return self.length if begin is None else max(0, self.ban.owner(self.tokens, begin))

    def rewind(self, length: int) -> None:
        del self.tokens[length:]

    def roll_back(self, length: int) -> None:
        token = self.tokens[length]
        self.rewind(length)
        self.forbidden.setdefault(tuple(self.tokens), set()).add(token)
        self.count += 1
        if self.count > self.ban.rollbacks:
            self.ended_by = "too many"

    def retreat(self) -> int | None:
        if not self.tokens:
            self.ended_by = "dead end"
            return None
        return self.length - 1
