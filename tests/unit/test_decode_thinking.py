"""Thinking and content of a text, wherever it is cut; stop strings that act behind the thinking alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given
from tokenizers import decoders, models

from foredraft.decode import thinking as module
from foredraft.decode.text_buffer import TextBuffer
from foredraft.decode.thinking import Part, ThinkingMarkers, ThinkingReader
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.conversation import FINAL
from tests.support.mutation import Mutant, assert_caught, defect

Function = Callable[..., Any]
THINK = ThinkingMarkers("<think>", "</think>")
BEGUN = ThinkingMarkers("<think>", "</think>", begun=True)
GRANITE = ThinkingMarkers("<think>", "</think>", answer=("<response>", "</response>"))
GEMMA_4 = ThinkingMarkers("<|channel>thought", "<channel|>")
HARMONY = ThinkingMarkers(
    "<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{FINAL}", answer=(FINAL, "")
)
# How thinking is marked, a text, its thinking and its content.
TEXTS = {
    "Qwen 3": (THINK, "<think>\nso\n\nit is\n</think>\n\nYes.\n", "so\n\nit is", "Yes.\n"),
    "R1": (BEGUN, "so <b> </thin\n</think>\n\n  Yes.", "so <b> </thin", "  Yes."),
    "white space before": (THINK, "\n <think>so</think>Yes.", "so", "Yes."),
    "none": (THINK, "<b>Yes</b>.", "", "<b>Yes</b>."),
    "none after white space": (THINK, "\n\nYes", "", "\n\nYes"),
    "empty": (THINK, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "a marker in the content": (THINK, "<think>a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
    "no content": (BEGUN, "so\n</think>\n", "so", ""),
    "no end": (BEGUN, "so\n\nit", "so\n\nit", ""),
    "nothing": (THINK, "", "", ""),
    "Granite": (GRANITE, "<think>so</think>\n<response>Yes</response>", "so", "Yes"),
    "Granite without an answer's markers": (GRANITE, "<think>so</think><resp>", "so", "<resp>"),
    "Granite without thinking": (GRANITE, "<response>Yes</response>", "", "Yes"),
    "Gemma 4": (GEMMA_4, "<|channel>thought\nso\n<channel|>Yes <channel|>.", "so", "Yes <channel|>."),
    "Gemma 4, another channel": (GEMMA_4, "<|channel>final\nYes", "", "<|channel>final\nYes"),
    "gpt-oss": (
        HARMONY,
        f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{FINAL}Yes.",
        "so",
        "Yes.",
    ),
    "gpt-oss without analysis": (HARMONY, f"{FINAL}Yes.", "", "Yes."),
}


def read(
    thinking: ThinkingMarkers, pieces: list[str], *, cut: bool = False
) -> tuple[str, str, ThinkingReader]:
    reader, parts = ThinkingReader(thinking), list[Part]()
    for piece in pieces:
        parts += reader.read(piece)
    parts += reader.end(cut=cut)
    assert all(text for _, text in parts)
    thought, content = ("".join(x for each, x in parts if each == kind) for kind in ("thinking", "content"))
    return thought, content, reader


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_the_same_parts_wherever_it_is_cut_into_pieces(name: str) -> None:
    thinking, text, thought, content = TEXTS[name]
    assert read(thinking, list(text))[:2] == (thought, content)
    for at in range(len(text) + 1):
        assert read(thinking, [text[:at], text[at:]])[:2] == (thought, content), at


@pytest.mark.parametrize("name", TEXTS)
def test_a_limit_shows_nothing_of_a_marker(name: str) -> None:
    thinking, text, thought, content = TEXTS[name]
    for end in range(len(text) + 1):
        whole = read(thinking, [text[:end]], cut=True)[:2]
        assert read(thinking, list(text[:end]), cut=True)[:2] == whole
        assert thought.startswith(whole[0]) and content.startswith(whole[1]), text[:end]


@given(st.text(st.sampled_from("<>/think ab\n"), max_size=30), st.data())
def test_any_text_has_the_same_parts_wherever_it_is_cut(text: str, data: st.DataObject) -> None:
    for thinking in (THINK, BEGUN, GRANITE):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(thinking, pieces)[:2] == read(thinking, [text])[:2]


@pytest.mark.parametrize("name", TEXTS)
def test_the_places_of_the_parts_are_known(name: str) -> None:
    thinking, text, _, content = TEXTS[name]
    *_, reader = read(thinking, list(text))
    if thinking.closes not in text:
        assert reader.thought == (0 if not thinking.begun else module.sys.maxsize)
    else:
        assert text[: reader.thought].endswith(thinking.closes)
    if content and not thinking.answer[0]:
        assert reader.content_at is not None and text[reader.content_at :] == content


WORDS = ("<", "think", ">", "/", "a", "b", "\n", "</", ">b", "\nab", "é")


@functools.cache
def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(WORDS)}, []))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["[THINK]", "[/THINK]", "<|channel>", "<channel|>"])
    return Tokenizer(inner)


def stopped(
    thinking: ThinkingMarkers | None, tokens: list[int], stops: list[str]
) -> tuple[int, str, str | None]:
    marks = {} if thinking is None else tokenizer().special_within(thinking.markers)
    buffer = TextBuffer(tokenizer().detokenizer, stops, thinking=thinking, marks=marks)
    count = buffer.push(tokens)
    released = "".join(text for _, text in buffer.release(count))
    assert buffer.text.startswith(released)
    buffer.finish()
    return count, buffer.text, buffer.stopped_by


def brute(tokens: list[int], stops: list[str], *, begun: bool) -> tuple[int, str, str | None]:
    markers, text = ThinkingMarkers("<think>", "</think>", begun), "".join(WORDS[id] for id in tokens)
    for count, length in enumerate(accumulate(len(WORDS[id]) for id in tokens), 1):
        _, content, reader = read(markers, [text[:length]], cut=True)
        found = [(content.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in content]
        if reader.content_at is not None and found:
            end, _, stop = min(found)
            return count, text[: reader.content_at + end - len(stop)], stop
    return len(tokens), text, None


TOKENS = st.lists(st.sampled_from(range(len(WORDS))), max_size=12)
MARKED = st.sampled_from([[0, 1, 2], [0, 1, 8], [7, 1, 2], [7, 1, 8], [0, 3, 1, 2]])
STOPS = st.lists(st.sampled_from(["ab", "b", "\n", ">b", "k>", "</think>", "<"]), min_size=1, max_size=2)


@given(
    st.lists(TOKENS | MARKED, max_size=4),
    STOPS,
    st.booleans(),
)
def test_stop_strings_act_behind_the_thinking(parts: list[list[int]], stops: list[str], begun: bool) -> None:
    tokens = [id for part in parts for id in part]
    found = stopped(ThinkingMarkers("<think>", "</think>", begun), tokens, stops)
    assert found == brute(tokens, stops, begun=begun)


def test_stop_strings_act_in_the_thinking_where_that_is_asked() -> None:
    tokens = [0, 1, 2, 4, 5, 7, 1, 2, 6, 6, 4, 5, 4]  # <think>ab</think>\n\naba
    thinking = ThinkingMarkers("<think>", "</think>")
    assert stopped(thinking, tokens, ["ab"]) == (12, "<think>ab</think>\n\n", "ab")
    assert stopped(thinking, tokens, ["\n"]) == (13, "<think>ab</think>\n\naba", None)
    assert stopped(thinking, tokens, ["think"])[2] is None
    asked = ThinkingMarkers("<think>", "</think>", stops=True)
    assert stopped(asked, tokens, ["ab"]) == (5, "<think>", "ab")
    assert stopped(None, tokens, ["ab"]) == (5, "<think>", "ab")


def test_markers_that_are_special_tokens_are_shown() -> None:
    opens, closes = len(WORDS), len(WORDS) + 1
    tokens = [opens, 4, 5, closes, 4, 5]
    assert stopped(None, tokens, [])[1] == "abab"
    assert stopped(ThinkingMarkers("[THINK]", "[/THINK]"), tokens, []) == (6, "[THINK]ab[/THINK]ab", None)
    assert stopped(ThinkingMarkers("[THINK]", "[/THINK]"), tokens, ["ab"]) == (6, "[THINK]ab[/THINK]", "ab")
    tokens = [opens + 2, 1, 4, 5, closes + 2, 4, 5]  # the marker before the thinking is more than its token
    thinking = ThinkingMarkers("<|channel>think", "<channel|>")
    assert stopped(thinking, tokens, []) == (7, "<|channel>thinkab<channel|>ab", None)
    assert stopped(thinking, tokens, ["ab"]) == (7, "<|channel>thinkab<channel|>", "ab")


def text_before_the_marker(think: Function) -> Function:
    def mutated(reader: ThinkingReader, parts: list[Part]) -> None:
        think(reader, parts)
        if reader._phase == "after":
            reader._text, reader.thought = ">" + reader._text, reader.thought - 1

    return mutated


pieces = partial(test_a_text_has_the_same_parts_wherever_it_is_cut_into_pieces, "Qwen 3")
limits = partial(test_a_limit_shows_nothing_of_a_marker, "Qwen 3")
stops = test_stop_strings_act_in_the_thinking_where_that_is_asked
MUTANTS = [
    defect("the marker's last character is content", ThinkingReader._think, text_before_the_marker, pieces),
    defect("a marker is shown while it begins", module.overlap, lambda _: lambda text, marker: 0, pieces),
    defect("a cut marker is shown", ThinkingReader.end, lambda end: lambda own, cut=False: end(own), limits),
    defect("stop strings act in the thinking", TextBuffer._content, lambda _: lambda _, piece: piece, stops),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
