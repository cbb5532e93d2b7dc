"""ConstraintFactory: the constraints of a request's sequences, made of its options.

Requests with the same options share automata, and the samples of one request a compiled grammar; state
belongs to one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count

from foredraft.constraints import KEPT_BYTES, KEPT_LISTS, LRUCache
from foredraft.constraints.banned import BanList, BannedByMask, BannedByRollback, Phrases
from foredraft.constraints.combined import AfterThinking, AllowedTokens, Combined, mask_of
from foredraft.constraints.grammar import (
    MAX_OVERDUE,
    SIMPLER,
    Grammar,
    MaskThreads,
    Pace,
    compile_grammar,
    grammar_tokenizer,
    with_slices,
)
from foredraft.constraints.phrases import PhraseState, PhraseTrack, TokenAutomaton, prompt_state
from foredraft.constraints.token_table import ThinkingTokens, TokenTable
from foredraft.decode.constraint import Constraint, Guarded
from foredraft.decode.params import SamplingParams
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer

SMALL = 2048  # characters of a schema or a regular expression; a mask of 50 recursive lists takes 0.04 s
# Requests with a grammar before slices are made for them: a process most often has only one, and slices would
# double its wait for the first token.
WITHOUT_SLICES = 1


class ConstraintFactory:
    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._codec = lru_cache(1)(lambda: ByteCodec(tokenizer))
        self._table = lru_cache(4)(self._make_table)
        self._thinking_tokens = lru_cache(4)(self._make_thinking_tokens)
        self._lists = LRUCache[tuple[Phrases, frozenset[int], bool], BanList](KEPT_LISTS, KEPT_BYTES)
        self._ll_tokenizer = lru_cache(1)(lambda: grammar_tokenizer(self._codec(), vocabulary, ends))
        self._sliced = lru_cache(1)(lambda: with_slices(self._ll_tokenizer()))
        self._grammars_used = count()
        self._mask_threads = MaskThreads()

    def maker(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        show_special: bool = False,
        thinking: ThinkingMarkers | None = None,
    ) -> Callable[[], Constraint]:
        """Return a function that makes a fresh constraint for each sequence of a request.

        Each request compiles its grammar: matchers of one share a lexer, whose states one request may use up.
        """
        ids = params.allowed_token_ids
        ends = params.ends(self._ends)
        allowed = None if ids is None else mask_of(ids, self._vocabulary)
        banned = self._ban_maker(prompt, params, ends, show_special) if params.ban else None
        grammar = self._grammar_maker(*params.text_grammar) if params.text_grammar is not None else None
        waits = None if thinking is None or grammar is None else self._thinking_tokens(thinking.markers)

        def make(waits: ThinkingTokens | None = waits) -> Guarded:
            parts: dict[str, Constraint] = {}
            if banned is not None:
                parts["ban"] = banned()
            if grammar is not None and params.text_grammar is not None:
                part = grammar()
                begun = thinking is not None and thinking.begun
                parts[params.text_grammar[0]] = part if waits is None else AfterThinking(waits, begun, part)
            if allowed is not None:
                parts["allowed_token_ids"] = AllowedTokens(allowed)
            if len(parts) == 1 and not (ends and params.min_new_tokens):
                return Guarded(next(iter(parts.values())))
            return Guarded(Combined(parts, ends, params.min_new_tokens))

        first = make(None)  # of the content, wherever that begins
        if params.max_new_tokens and first.at_dead_end:
            option = "ban" if params.ban else "allowed_token_ids"
            option = option if params.text_grammar is None else params.text_grammar[0]
            if first.failed is not None:
                raise RequestError(f"cannot be used: {first.failed}", option=option, remedy=SIMPLER)
            raise RequestError("leaves no token to begin with", option=option, remedy="allow some text")
        return make

    def _ban_maker(
        self, prompt: list[int], params: SamplingParams, ends: frozenset[int], show_special: bool
    ) -> Callable[[], Constraint]:
        """Return a function that makes the ban of each sequence; what they share is made here."""
        endings = () if params.include_stop else tuple(params.stop)
        ban = Phrases(tuple(params.ban), params.ban_ignore_case, params.ban_whole_words, endings)
        key = ban, ends, show_special
        banned = self._lists.get(key, ban.size, lambda: BanList(ban, self._table(ends, show_special)))
        automaton = banned.automaton
        start = automaton.phrases.start
        if params.ban_prompt:
            start = self._prompt_state(automaton, prompt, show_special)
        if params.ban_mode == "mask":
            masks = banned.masks
            return lambda: BannedByMask(masks, PhraseTrack(automaton, start, params.max_new_tokens))
        may_end = bool(ends) and params.min_new_tokens == 0
        holds_all = params.text_grammar is not None or not (may_end or banned.has_safe_token)
        return lambda: BannedByRollback(
            PhraseTrack(automaton, start, params.max_new_tokens),
            self._vocabulary, params.ban_rollbacks, holds_all=holds_all,
        )  # fmt: skip

    def _prompt_state(self, automaton: TokenAutomaton, prompt: list[int], show_special: bool) -> PhraseState:
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

    def _make_thinking_tokens(self, markers: tuple[str, str]) -> ThinkingTokens:
        texts = self._codec().table(self._vocabulary)
        for id, marker in self._tokenizer.special_ids(markers).items():
            if id < self._vocabulary:
                texts[id] = marker.encode()
        return ThinkingTokens(texts, *markers, self._ends)

    def _grammar_maker(self, option: str, text: str) -> Callable[[], Grammar]:
        """Return a function that makes the grammar of each sequence; what they share is made here."""
        if self._mask_threads.overdue >= MAX_OVERDUE:
            raise RequestError(
                f"cannot be used now: {MAX_OVERDUE} masks of other requests, which were too slow, still run",
                option=option, remedy="try again later",
            )  # fmt: skip
        small = option != "grammar" and len(text) <= SMALL
        sliced = next(self._grammars_used) >= WITHOUT_SLICES
        tokenizer = self._sliced() if sliced else self._ll_tokenizer()
        pace = Pace(self._mask_threads, small=small)
        matcher = compile_grammar(option, text, tokenizer, pace)
        return lambda: Grammar(
            matcher.deep_copy(), self._ends, tokenizer.eos_token, self._vocabulary, option, pace
        )
