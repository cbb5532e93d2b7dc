"""Stop strings against a brute-force definition, and text that is released as soon as nothing can change it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models

from foredraft.decode import text_buffer
from foredraft.decode.text_buffer import StopAutomaton, TextBuffer
from foredraft.model.tokenizer import Detokenizer, Tokenizer
from tests.support.checkpoints import tiny_tokenizer
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.mutations import around, holding

Function = Callable[..., Any]
LETTERS = "ab"


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, with tokens of one to several characters, and of parts of one."""
    return Tokenizer(tiny_tokenizer(384))


@functools.cache
def letters() -> Tokenizer:
    """Every string of up to three letters of two: stop strings lie across and inside tokens."""
    words = [a + b + c for a in LETTERS for b in ["", *LETTERS] for c in ["", *LETTERS]]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner)


def made(tokens: Tokenizer, stops: list[str], include: bool = False, least: int = 0) -> TextBuffer:
    return TextBuffer(tokens.detokenizer, stops, include=include, least=least)


def so_far(tokens: Tokenizer, ids: list[int]) -> str:
    return tokens.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


def brute(
    tokens: Tokenizer, ids: list[int], stops: list[str], include: bool, least: int
) -> tuple[int, str, str | None]:
    """Return the tokens read, the text, and the string that ended it, by a search after every token."""
    early = len(so_far(tokens, ids[: max(0, least - 1)]))
    for count in range(1, len(ids) + 1):
        text = so_far(tokens, ids[:count])
        ends = sorted(
            (start + len(stop), start)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > early
        )
        if ends and count >= least:
            end, start = ends[0]
            return count, text[: end if include else start], text[start:end]
    return len(ids), tokens.decode(ids), None


def check(tokens: Tokenizer, ids: list[int], stops: list[str], include: bool, least: int) -> None:
    found = made(tokens, stops, include, least)
    read = 0
    shown: dict[int, str] = {}
    for at, token in enumerate(ids):
        read += found.push([token])
        for index, part in found.release(at + 1):
            shown[index] = shown.get(index, "") + part
        if found.stopped_by is not None:
            break
        if tokens is letters():  # whose text is never uncertain by itself
            held = tokens.decode(ids[: at + 1]).removeprefix("".join(shown.values()))
            prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
            longest = next((held[i:] for i in range(len(held)) if held[i:] in prefixes), "")
            assert held == longest, "only what may begin a stop string is held"
    found.finish()
    for index, part in found.release(read):
        shown[index] = shown.get(index, "") + part
    assert (read, found.text, found.stopped_by) == brute(tokens, ids, stops, include, least)
    assert [shown.get(index, "") for index in range(read)] == found.pieces, "released once, and all of it"


stops_of_letters = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=250, report_multiple_bugs=False)
@given(st.lists(st.integers(0, 13), max_size=14), stops_of_letters, st.booleans(), st.integers(0, 6))
def test_stop_strings_are_as_defined(ids: list[int], stops: list[str], include: bool, least: int) -> None:
    check(letters(), ids, stops, include, least)


@settings(max_examples=200)
@given(st.data())
def test_a_stop_string_in_text_of_any_bytes(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 383), min_size=1, max_size=12))
    text = so_far(tokenizer(), ids)
    pieces = st.integers(0, max(0, len(text) - 1)).map(lambda i: text[i : i + 3])
    stops = [stop for stop in data.draw(st.lists(pieces, max_size=3)) if stop and "\ufffd" not in stop]
    check(tokenizer(), ids, stops or ["zz"], data.draw(st.booleans()), 0)


@given(st.lists(st.integers(0, 13), max_size=14), stops_of_letters, st.data())
def test_a_rewound_buffer_equals_a_fresh_one(ids: list[int], stops: list[str], data: st.DataObject) -> None:
    found = made(letters(), stops)
    found.push(ids)
    kept = data.draw(st.integers(0, len(found.tokens)))
    found.rewind(kept)
    fresh = made(letters(), stops)
    fresh.push(ids[:kept])
    again = data.draw(st.lists(st.integers(0, 13), max_size=6))
    assert found.stopped_by == fresh.stopped_by
    if found.stopped_by is None:
        assert found.push(again) == fresh.push(again)
    assert (found.text, found.stopped_by, found.tokens) == (fresh.text, fresh.stopped_by, fresh.tokens)


def test_a_line_break_of_a_byte_token_stops_at_once() -> None:
    """Llama 2 spells line breaks <0x0A>, and a run of bytes is shown only when it ends."""
    vocabulary = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = made(Tokenizer(inner), ["\n"])
    assert found.push([1, 0x0A + 2, 1, 1]) == 2
    assert (found.text, found.stopped_by) == ("a", "\n")
    found = made(Tokenizer(inner), ["é"])
    assert found.push([1, 0xC3 + 2, 0xA9 + 2, 1]) == 3
    assert found.text == "a"


def test_a_special_token_may_be_a_stop_string_though_it_is_not_shown() -> None:
    tokens = tokenizer()
    [end] = tokens.special_ids(["</s>"])
    assert end == 2
    ids = [*tokens.encode("draft", add_special_tokens=False), end, 9]
    for include, text in ((False, "draft"), (True, "draft</s>")):
        found = TextBuffer(tokens.detokenizer, ["</s>"], ends={end: "</s>"}, include=include)
        assert found.push(ids) == len(ids) - 1
        assert (found.text, found.stopped_by) == (text, "</s>")
    found = TextBuffer(tokens.detokenizer, ["</s>"], ends={end: "</s>"}, least=len(ids))
    assert found.push(ids) == len(ids), "too early to count"
    assert not tokens.special_ids(["draft"])


@around
def first_token_ignored(look: Function, buffer: TextBuffer, token: int) -> None:
    if len(buffer.tokens) > 1:
        look(buffer, token)


step_without_fallback = around(
    lambda step, automaton, node, character: step(
        automaton, node if character in automaton._next[node] else 0, character
    )
)


@around
def own_strings_alone(make: Function, automaton: StopAutomaton, strings: tuple[str, ...]) -> None:
    """Forget the stop strings that are complete within a longer prefix."""
    make(automaton, strings)
    automaton.complete = [automaton.ends.get(node) for node in range(len(automaton.depth))]


last_piece_trimmed = around(lambda trimmed, pieces, surplus: [*pieces[:-1], *trimmed(pieces[-1:], surplus)])


def definition() -> None:
    """The same over fixed cases, of which none is searched for the smallest that fails."""
    dice = random.Random(7)
    for _ in range(400):
        stops = ["".join(dice.choices(LETTERS, k=dice.randint(1, 6))) for _ in range(dice.randint(1, 4))]
        ids = dice.choices(range(14), k=dice.randrange(15))
        check(letters(), ids, stops, include=dice.random() < 0.5, least=dice.randrange(7))


line_break = test_a_line_break_of_a_byte_token_stops_at_once
EARLY = holding(lambda buffer, *_: (buffer, "_early", 0))
OPEN, STEP = StopAutomaton.open, StopAutomaton.step
MUTANTS = [
    defect("found a token after it is complete", TextBuffer._look, first_token_ignored, definition),
    defect("the automaton does not fall back", STEP, step_without_fallback, definition),
    defect("a stop string inside another is missed", StopAutomaton.__init__, own_strings_alone, definition),
    defect("what may begin a stop string is shown", OPEN, lambda _: lambda *node: 0, definition),
    defect("one character too many is held", OPEN, lambda sound: lambda *node: sound(*node) + 1, definition),
    defect("complete too early, and counted later", TextBuffer._scan, EARLY, definition),
    defect("only the last token's text is cut", text_buffer._trimmed, last_piece_trimmed, definition),
    defect("bytes looked at when their run ends", Detokenizer.pending, lambda _: lambda _: "", line_break),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
