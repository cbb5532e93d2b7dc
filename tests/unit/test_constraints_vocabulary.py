"""What constraints make of a whole vocabulary at once, against its definition token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from torch import Tensor

from foredraft.constraints import factory as factories
from foredraft.constraints import grammar as grammars
from foredraft.constraints.factory import ConstraintFactory
from foredraft.constraints.phrases import (
    BLOCK,
    BOUNDARY,
    LAST,
    ROOT,
    PhraseAutomaton,
    Symbols,
    is_word,
    words_within,
)
from foredraft.constraints.token_masks import TokenMasks
from foredraft.constraints.token_table import TokenTable
from foredraft.decode.params import SamplingParams
from foredraft.model.byte_codec import ByteCodec
from tests.support import alphabets

OPTIONS = st.tuples(st.booleans(), st.booleans())
WORDS = st.text(st.sampled_from("abAß _.\0\U0001f642いろ"), min_size=1, max_size=9)
LONG = [b"aaaaaaab", b"aaaaaaaa", b"aaaaaaa", b"aaaaaa\0", "aaaaaaaいろ".encode()]  # equal at the beginning
PARTS = [b"", b"\xe3", b"\x81\x84", b"a\xe3\x81", b"\xff", b"\0", *LONG]
TOKENS = st.lists(st.one_of(WORDS.map(str.encode), st.sampled_from(PARTS)), min_size=1, max_size=30)


@given(tokens=TOKENS, phrases=st.lists(WORDS, min_size=1, max_size=4), options=OPTIONS)
@settings(max_examples=300)
def test_a_vocabulary_is_sorted_and_searched_as_its_tokens_are(
    tokens: list[bytes], phrases: list[str], options: tuple[bool, bool]
) -> None:
    ignore_case, whole_words = options
    automaton = PhraseAutomaton(phrases, Symbols(ignore_case=ignore_case, whole_words=whole_words), ("x",))
    masks = TokenMasks(automaton, TokenTable(tuple(tokens), frozenset([0])))
    decoded = [automaton.decoded(b"", text) for text in tokens]
    streams = [symbols for symbols, _ in decoded]
    if whole_words:
        streams[0] = BOUNDARY
    order = sorted(range(len(tokens)), key=streams.__getitem__)
    assert masks._order.tolist() == order
    assert masks._sorted == [streams[id] for id in order]
    assert masks._within.tolist() == [automaton.completes(ROOT, each) for each in streams]
    closed = [automaton.completes(ROOT, each + automaton.end_symbols) for each in streams]
    assert (masks._within | masks._within_last).tolist() == closed
    opening = {(decoded[id][0], decoded[id][1]) for id in range(len(tokens)) if decoded[id][1]}
    assert masks._opening.keys() == opening


@given(tokens=TOKENS)
def test_what_tokens_add_is_known_of_all_at_once(tokens: list[bytes]) -> None:
    table, ends = TokenTable(tuple(tokens), frozenset([0, 10**6])), {0}
    assert table.speaks.tolist() == [bool(text) and id not in ends for id, text in enumerate(tokens)]
    assert table.idle.tolist() == [not text and id not in ends for id, text in enumerate(tokens)]


@given(texts=st.lists(st.text(max_size=4), min_size=1, max_size=9), options=OPTIONS)
def test_symbols_of_several_texts_are_those_of_each(texts: list[str], options: tuple[bool, bool]) -> None:
    ignore_case, whole_words = options
    symbols = Symbols(ignore_case=ignore_case, whole_words=whole_words)
    assert symbols.of_each(texts) == [symbols.of(text) for text in texts]


def test_characters_of_words_are_counted_as_they_are_one_by_one() -> None:
    words = np.array([is_word(chr(code)) for code in range(LAST)]).reshape(-1, BLOCK).sum(1)
    counted = [words_within(range(start, start + BLOCK)) for start in range(0, LAST, BLOCK)]
    assert counted == words.tolist()


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string", "maxLength": 9}}}'
)
TEXT = '{"a": "The target checks", "b": "all to"}'


def made(option: str, text: str, tokenizer: LLTokenizer, ends: frozenset[int], size: int) -> grammars.Grammar:
    pace = grammars.Pace(grammars.MaskThreads())
    matcher = grammars.compile_grammar(option, text, tokenizer, pace)
    return grammars.Grammar(matcher, ends, tokenizer.eos_token, size, option, pace)


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_masks_with_slices_are_those_without(name: str) -> None:
    codec, size, ends = ByteCodec(alphabets.make(name)), 600, frozenset([2])
    plain = grammars.grammar_tokenizer(codec, size, ends)
    for option, text in (("json_schema", SCHEMA), ("regex", '.*"b": "[a-z ]{1,30}"}')):
        one, other = (made(option, text, each, ends, size) for each in (plain, grammars.with_slices(plain)))
        for token in codec.spell(TEXT):
            masks = one.mask(), other.mask()
            assert masks[0] is not None and masks[1] is not None and torch.equal(*masks)
            one.advance(token)
            other.advance(token)


def test_a_long_text_keeps_few_masks_and_can_be_rewound_to_all() -> None:
    codec, size, ends = ByteCodec(alphabets.make("byte-level")), 600, frozenset([2])
    tokenizer = grammars.grammar_tokenizer(codec, size, ends)
    grammar = made("regex", "[a-z ]{1,400}", tokenizer, ends, size)
    tokens, masks = codec.spell("the target checks all " * 16), list[Tensor | None]()
    for token in tokens:
        masks.append(grammar.mask())
        grammar.advance(token)
    assert len(tokens) > 2 * grammars.KEPT >= 2 * len(grammar._masks)
    for length in range(len(tokens) - 1, -1, -1):
        grammar.rewind(length)
        found, before = grammar.mask(), masks[length]
        assert found is not None and before is not None and torch.equal(found, before)


@pytest.mark.parametrize("name", alphabets.KINDS)
def test_a_whole_text_of_a_model_without_an_end_can_only_stop(name: str) -> None:
    """The library needs an end of text, and gets an id that shows no text; it must not be drawn."""
    codec, size, ends = ByteCodec(alphabets.make(name)), 600, frozenset[int]()
    tokenizer = grammars.grammar_tokenizer(codec, size, ends)
    grammar = made("regex", "ab", tokenizer, ends, size)
    for token in codec.spell("ab"):
        assert not grammar.at_dead_end
        grammar.advance(token)
    assert grammar.at_dead_end and grammar.retreat() is None
    assert grammar.ended_by == "regex: the text is complete, and no end-of-text token is allowed"


def test_slices_are_made_for_the_second_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, made = alphabets.make("byte-level"), []

    def note(tables: LLTokenizer) -> LLTokenizer:
        made.append(tables)
        return grammars.with_slices(tables)

    monkeypatch.setattr(factories, "with_slices", note)
    factory = ConstraintFactory(tokenizer, 384, frozenset([2]))
    make = factory.maker([1], SamplingParams(regex="[a-z]+", max_new_tokens=9))
    make()
    make()
    assert not made
    for regex in ("[0-9]+", "[a-z]+"):
        factory.maker([1], SamplingParams(regex=regex, max_new_tokens=9))()
    assert len(made) == 1
