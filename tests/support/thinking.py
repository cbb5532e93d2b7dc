"""A grammar behind thinking by its definition: plain search in the whole text at every step, without an automaton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.constraints.combined import AfterThinking, ThinkingTokens
from foredraft.constraints.grammar import Grammar, Grammars
from foredraft.decode.constraint import Constraint

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
        return ByDefinition(self)

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


class ByDefinition(Constraint):
    def __init__(self, thought: Thought) -> None:
        super().__init__()
        self.thought = thought

    def mask(self) -> Tensor:
        size = len(self.thought.texts)
        return torch.tensor([self.thought.is_legal([*self.tokens, id]) for id in range(size)])
