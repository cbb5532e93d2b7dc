"""Banned text, and a grammar behind thinking, by definition: plain search in the whole text at every step."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from foredraft.constraints.banned import BanList, BannedByMask, BannedByRollback
from foredraft.constraints.combined import AfterThinking, ThinkingTokens
from foredraft.constraints.grammar import Grammar, Grammars
from foredraft.constraints.phrases import PhraseAutomaton, Symbols
from foredraft.constraints.token_masks import TokenTable
from foredraft.decode.constraint import Constraint


@dataclass(frozen=True)
class Ban:
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
        banned = BanList(automaton, TokenTable(self.texts, self.ends))
        start = automaton.after(self.text([]))
        if self.mode == "mask":
            return BannedByMask(banned, start, self.last)
        return BannedByRollback(banned, start, self.last, self.rollbacks, holds_all=True)

    def defined(self) -> Constraint:
        return ByDefinition(self) if self.mode == "mask" else RollbackByDefinition(self)

    def matches(self, tokens: list[int]) -> set[tuple[int, int]]:
        """Return (end, begin) of every banned phrase in the text, in characters; a whole word ends behind its boundary."""
        ended = bool(tokens) and (tokens[-1] in self.ends or len(tokens) >= self.last)
        text, found = _decoded(self.text(tokens)), set()
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
        return _first_begun(self.matches(tokens) - self.matches(tokens[:-1]))

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self.texts[token] for token in [*self.prompt, *tokens])

    def open_bytes(self, tokens: list[int]) -> bytes:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self.text(tokens))
        return decoder.getstate()[0]

    def without_idle(self, allowed: list[bool]) -> Tensor:
        """Return a mask; tokens without text are allowed only beside one with text, unless they are ends."""
        ids = range(len(self.texts))
        if not any(allowed[id] and self.texts[id] and id not in self.ends for id in ids):
            allowed = [allowed[id] and (bool(self.texts[id]) or id in self.ends) for id in ids]
        return torch.tensor(allowed)

    def owner(self, tokens: list[int], character: int) -> int:
        """Return the index of the new token with a character's first byte, -1 for one of the prompt."""
        place = _first_bytes(self.text(tokens))[character]
        for index, token in enumerate([*self.prompt, *tokens]):
            place -= len(self.texts[token])
            if place < 0:
                return max(-1, index - len(self.prompt))
        raise AssertionError("no such character")


def _first_begun(matches: set[tuple[int, int]]) -> int | None:
    """Return where the shortest of the matches that end first begins; None without one."""
    return -min((end, -begin) for end, begin in matches)[1] if matches else None


def _decoded(data: bytes) -> str:
    """Return the text of bytes, without a character at the end whose last bytes are missing."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


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


def _is_utf8(data: bytes) -> bool:
    """Return whether bytes are characters, of which the last may lack its last bytes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


class ByDefinition(Constraint):
    def __init__(self, ban: Ban) -> None:
        super().__init__()
        self.ban = ban

    def mask(self) -> Tensor:
        ids = range(len(self.ban.texts))
        return self.ban.without_idle([self._is_legal([*self.tokens, id]) for id in ids])

    def _is_legal(self, tokens: list[int], depth: int = 0) -> bool:
        """Return whether the last token completes no phrase, and the character that it leaves open may end."""
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

    def retreat(self) -> int | None:
        self.ended_by = "dead end"
        ended = replace(self.ban, last=len(self.tokens))
        begin = _first_begun(ended.matches(self.tokens) - self.ban.matches(self.tokens))
        return None if begin is None else max(0, self.ban.owner(self.tokens, begin))


class RollbackByDefinition(Constraint):
    def __init__(self, ban: Ban) -> None:
        super().__init__()
        self.ban, self.count = ban, 0
        self.forbidden: dict[tuple[int, ...], set[int]] = {}

    def mask(self) -> Tensor:
        forbidden = self.forbidden.get(tuple(self.tokens), set())
        return self.ban.without_idle([id not in forbidden for id in range(len(self.ban.texts))])

    def advance(self, token: int) -> int:
        super().advance(token)
        begin = self.ban.new_match(self.tokens)
        return self.length if begin is None else max(0, self.ban.owner(self.tokens, begin))

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


BREAKS = 2  # line breaks that may stand between the thinking and the content


@dataclass
class Spelling:
    texts: tuple[bytes, ...]

    def table(self, size: int) -> list[bytes]:
        return list(self.texts[:size])

    def spell(self, text: str) -> list[int]:
        data, ids = text.encode(), list[int]()
        while data:
            fitting = [id for id, each in enumerate(self.texts) if each and data.startswith(each)]
            if not fitting:
                break
            ids.append(max(fitting, key=lambda id: len(self.texts[id])))
            data = data[len(self.texts[ids[-1]]) :]
        return ids


@dataclass(frozen=True)
class Thought:
    texts: tuple[bytes, ...]
    opens: str
    closes: str
    begun: bool
    grammar: tuple[str, str]  # an option, and its value
    accepted: tuple[bytes, ...]  # the texts of the grammar
    ends: frozenset[int]

    def __deepcopy__(self, memo: object) -> Thought:
        return self

    @cached_property
    def parts(self) -> tuple[ThinkingTokens, Callable[[], Grammar]]:
        grammars = Grammars(Spelling(self.texts), len(self.texts), self.ends)
        return ThinkingTokens(self.texts, self.opens, self.closes, self.ends), grammars.maker(*self.grammar)

    def shipped(self) -> AfterThinking:
        tokens, grammar = self.parts
        return AfterThinking(tokens, self.begun, grammar())

    def defined(self) -> Constraint:
        return ThinkingByDefinition(self)

    def join(self, tokens: list[int]) -> bytes:
        return b"".join(self.texts[token] for token in tokens)

    def is_legal(self, tokens: list[int]) -> bool:
        return self._may_think(tokens) or (not self.begun and self._fits(tokens))

    def content_of(self, tokens: list[int]) -> list[int] | None:
        """Return the tokens of the content; None where there is none, or it does not begin with a token."""
        opens = self.opens.encode()
        for count in range(1, len(tokens) + 1):
            text = (opens if self.begun else b"") + self.join(tokens[:count])
            if not text.startswith(opens):
                continue
            at = text.find(self.closes.encode(), len(opens))
            if at < 0:
                continue
            breaks = len(text) - at - len(self.closes)
            if text[len(text) - breaks :] != b"\n" * breaks or breaks > BREAKS:
                return None
            rest = tokens[count:]
            while rest and (more := self.texts[rest[0]]) and more == b"\n" * len(more):
                if breaks + len(more) > BREAKS:
                    break
                breaks, rest = breaks + len(more), rest[1:]
            return rest
        return None

    def _may_think(self, tokens: list[int]) -> bool:
        opens = self.opens.encode()
        text = (opens if self.begun else b"") + self.join(tokens)
        content = self.content_of(tokens)
        if content is not None:
            return self._fits(content)
        if tokens[-1] in self.ends or (text.startswith(opens) and self.closes.encode() in text[len(opens) :]):
            return False
        return text.startswith(opens) or (bool(text) and opens.startswith(text))

    def _fits(self, content: list[int]) -> bool:
        text = self.join(content)
        if content and content[-1] in self.ends:
            return text in self.accepted
        return any(each.startswith(text) for each in self.accepted)


class ThinkingByDefinition(Constraint):
    def __init__(self, thought: Thought) -> None:
        super().__init__()
        self.thought = thought

    def mask(self) -> Tensor:
        size = len(self.thought.texts)
        return torch.tensor([self.thought.is_legal([*self.tokens, id]) for id in range(size)])
