"""Constraints that requests ask for: banned text, regular expressions, JSON schemas and grammars.

`ConstraintFactory` makes them from sampling parameters. Automata and compiled grammars are shared by all
requests with the same options; state belongs to one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import TypeAlias

from llguidance import LLMatcher

from foredraft.constraints.banned import BannedByMask, BannedByRollback
from foredraft.constraints.combined import Combined
from foredraft.constraints.compiling import compile_grammar, grammar_tokenizer, with_slices
from foredraft.constraints.grammar import Grammar
from foredraft.constraints.phrases import BOUNDARY, PhraseAutomaton, State, Symbols
from foredraft.constraints.token_automaton import TokenAutomaton
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.constraints.track import PhraseTrack, prompt_state
from foredraft.decode.constraint import Constraint
from foredraft.decode.params import SamplingParams
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["ConstraintFactory"]

Ban: TypeAlias = tuple[tuple[str, ...], bool, bool, tuple[str, ...]]  # phrases, options, endings of a text
KEPT_LISTS = 16  # compiled ban lists; one of 10,000 phrases takes some 100 MB with its masks
KEPT_GRAMMARS = 256  # compiled grammars, some 100 kB each
# Grammars that a process uses before slices are made for them: those of the check and of the first sequence
# of its first request, most often its only one. Slices would double its wait for the first token.
WITHOUT_SLICES = 2


class ConstraintFactory:
    """Makes the constraints of requests to one model.

    Args:
        tokenizer: The target's.
        vocabulary: Size V of the target.
        ends: Ids that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._codec = lru_cache(1)(lambda: ByteCodec(tokenizer))
        self._table = lru_cache(4)(self._make_table)
        self._phrases = lru_cache(KEPT_LISTS)(self._make_phrases)
        self._automaton = lru_cache(KEPT_LISTS)(self._make_automaton)
        self._masks = lru_cache(KEPT_LISTS)(self._make_masks)
        self._safe = lru_cache(KEPT_LISTS)(self._has_safe_token)
        self._ll_tokenizer = lru_cache(1)(lambda: grammar_tokenizer(self._codec(), vocabulary, ends))
        self._sliced = lru_cache(1)(lambda: with_slices(self._ll_tokenizer()))
        self._grammars_used = count()
        self._matcher = lru_cache(KEPT_GRAMMARS)(self._compile)

    def maker(
        self, prompt: list[int], params: SamplingParams, *, show_special: bool = False
    ) -> Callable[[], Constraint | None]:
        """Return a function that makes a fresh constraint for each sequence of a request, or None.

        Args:
            prompt: The request's, whose text may count for banned phrases.
            params: The request's.
            show_special: Special tokens belong to the text.

        Raises:
            RequestError: A grammar is invalid or asks for what is not supported, or no text is allowed.
        """
        if not params.ban and params.text_grammar is None:
            return lambda: None
        ends = frozenset[int]() if params.ignore_eos else self._ends
        banned = self._ban_maker(prompt, params, ends, show_special) if params.ban else None

        def make() -> Constraint:
            parts: dict[str, Constraint] = {}
            if banned is not None:
                parts["ban"] = banned()
            if params.text_grammar is not None:
                option, _ = params.text_grammar
                sliced = next(self._grammars_used) >= WITHOUT_SLICES
                matcher = self._matcher(params.text_grammar, sliced).deep_copy()
                parts[option] = Grammar(matcher, self._ends, self._vocabulary, option)
            if len(parts) == 1 and not (ends and params.min_new_tokens):
                return next(iter(parts.values()))
            return Combined(parts, ends, params.min_new_tokens)

        if params.max_new_tokens and make().at_dead_end:
            option = "ban" if params.text_grammar is None else params.text_grammar[0]
            raise RequestError("leaves no token to begin with", option=option, remedy="allow some text")
        return make

    def _ban_maker(
        self, prompt: list[int], params: SamplingParams, ends: frozenset[int], show_special: bool
    ) -> Callable[[], Constraint]:
        """Return a function that makes the ban of each sequence; what they share is made here."""
        endings = () if params.include_stop else tuple(params.stop)
        ban = tuple(params.ban), params.ban_ignore_case, params.ban_whole_words, endings
        automaton = self._automaton(ban, ends, show_special)
        start = automaton.phrases.start
        if params.ban_prompt:
            start = self._prompt_state(automaton, prompt, show_special)
        if params.ban_mode == "mask":
            masks = self._masks(ban, ends, show_special)
            return lambda: BannedByMask(masks, PhraseTrack(automaton, start, params.max_new_tokens))
        holds_all = params.text_grammar is not None or not self._safe(
            ban, ends, show_special, params.min_new_tokens > 0
        )
        return lambda: BannedByRollback(
            PhraseTrack(automaton, start, params.max_new_tokens),
            self._vocabulary, params.ban_rollbacks, holds_all=holds_all,
        )  # fmt: skip

    def _prompt_state(self, automaton: TokenAutomaton, prompt: list[int], show_special: bool) -> State:
        """Return the automaton's state after as much of the prompt's end as a phrase may span."""
        phrases, table = automaton.phrases, automaton.table
        reach, texts = 4 * max(map(len, phrases.patterns)) + 4, list[bytes | None]()
        for token in reversed(prompt):
            if reach <= 0:
                break
            special = not show_special and token in self._tokenizer.special
            texts.append(None if special else table.texts[token])
            reach -= len(table.texts[token])
        return prompt_state(phrases, texts[::-1])

    def _make_table(self, ends: frozenset[int], show_special: bool) -> TokenTable:
        return TokenTable.of(self._codec(), self._vocabulary, ends, show_special=show_special)

    def _make_phrases(self, ban: Ban) -> PhraseAutomaton:
        phrases, ignore_case, whole_words, endings = ban
        return PhraseAutomaton(phrases, Symbols(ignore_case=ignore_case, whole_words=whole_words), endings)

    def _make_automaton(self, ban: Ban, ends: frozenset[int], show_special: bool) -> TokenAutomaton:
        return TokenAutomaton(self._phrases(ban), self._table(ends, show_special))

    def _make_masks(self, ban: Ban, ends: frozenset[int], show_special: bool) -> TokenMasks:
        return TokenMasks(self._phrases(ban), self._table(ends, show_special))

    def _has_safe_token(
        self, ban: Ban, ends: frozenset[int], show_special: bool, ends_are_barred: bool
    ) -> bool:
        """Return whether some token can never be forbidden by a rollback: it begins no phrase."""
        phrases, table = self._phrases(ban), self._table(ends, show_special)
        first = {pattern.lstrip(BOUNDARY)[0] for pattern in phrases.patterns}
        if ends and not ends_are_barred:
            return True
        for id in table.speaks.nonzero()[:, 0].tolist():
            symbols, pending = phrases.decoded(b"", table.texts[id])
            if not pending and not first.intersection(symbols):
                return True
        return False

    def _compile(self, grammar: tuple[str, str], sliced: bool) -> LLMatcher:
        return compile_grammar(*grammar, self._sliced() if sliced else self._ll_tokenizer())
