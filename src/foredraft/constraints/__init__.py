"""Constraints that requests ask for: allowed tokens, banned text, regular expressions, schemas and grammars.

Requests with the same options share automata, and the samples of one request a compiled grammar; state
belongs to one sequence. What only some requests ask for is imported by the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.constraints.shared_cache import caching
from foredraft.decode.constraint import SIMPLER, Constraint, Guarded
from foredraft.decode.params import SamplingParams
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foredraft.constraints.banned import Bans
    from foredraft.constraints.combined import ThinkingTokens
    from foredraft.constraints.grammar import Grammars

__all__ = ["AllowedTokens", "ConstraintFactory", "mask_of"]


class AllowedTokens(Constraint):
    option = "allowed_token_ids"

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self._mask = mask

    def mask(self) -> Tensor | None:
        return self._mask


def mask_of(ids: Collection[int], vocabulary: int) -> Tensor:
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(ids)] = True
    return mask


class ConstraintFactory:
    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._making = threading.Lock()  # cached properties have none since Python 3.12
        self._thinking_tokens = caching(self._make_thinking_tokens, 4)

    @cached_property
    def _codec(self) -> ByteCodec:
        return ByteCodec(self._tokenizer)

    @cached_property
    def bans(self) -> Bans:
        from foredraft.constraints.banned import Bans

        return Bans(self._tokenizer, self._codec, self._vocabulary)

    @cached_property
    def grammars(self) -> Grammars:
        from foredraft.constraints.grammar import Grammars

        return Grammars(self._codec, self._vocabulary, self._ends)

    def maker(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        show_special: bool = False,
        thinking: ThinkingMarkers | None = None,
    ) -> Callable[[], Constraint | None]:
        """Return a function that makes a fresh constraint for each sequence of a request, or None.

        Each request compiles its grammar: matchers of one share a lexer, whose states one request may use up.
        """
        ids, ends = params.allowed_token_ids, params.ends(self._ends)
        grammar, text = params.text_grammar or ("", "")
        if ids is None and not grammar and not params.ban:
            return lambda: None
        from foredraft.constraints.combined import AfterThinking, Combined

        made: dict[str, Callable[[], Constraint]] = {}
        waits: ThinkingTokens | None = None
        if params.ban:
            with self._making:
                bans = self.bans
            made["ban"] = bans.maker(prompt, params, ends, show_special)
        if grammar:
            with self._making:
                grammars = self.grammars
            made[grammar] = grammars.maker(grammar, text)
            waits = None if thinking is None else self._thinking_tokens(thinking.markers)
        if ids is not None:
            mask = mask_of(ids, self._vocabulary)
            made["allowed_token_ids"] = lambda: AllowedTokens(mask)

        def make(waits: ThinkingTokens | None = waits) -> Guarded:
            parts = {option: part() for option, part in made.items()}
            if waits is not None and thinking is not None:
                parts[grammar] = AfterThinking(waits, thinking.begun, parts[grammar])
            if len(parts) == 1 and not (ends and params.min_new_tokens):
                return Guarded(next(iter(parts.values())))
            return Guarded(Combined(parts, ends, params.min_new_tokens))

        first = make(None)  # of the content, wherever that begins
        if params.max_new_tokens and first.at_dead_end:
            option = grammar or next(iter(made))
            if first.failed is not None:
                raise RequestError(f"cannot be used: {first.failed}", option=option, remedy=SIMPLER)
            raise RequestError("leaves no token to begin with", option=option, remedy="allow some text")
        return make

    def _make_thinking_tokens(self, markers: tuple[str, str]) -> ThinkingTokens:
        from foredraft.constraints.combined import ThinkingTokens

        texts = self._codec.table(self._vocabulary)
        for id, marker in self._tokenizer.special_within(markers).items():
            if id < self._vocabulary:
                texts[id] = marker.encode()
        return ThinkingTokens(texts, *markers, self._ends)
