"""Scored text: the tokens that a reply lists, joined, are its text, whole and in every part of a stream."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.scores import Score
from foredraft.decode.stats import Stats
from foredraft.decode.text_buffer import TextBuffer
from foredraft.llm.output import Output, Piece
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve import scored_text
from foredraft.serve.blocks import ContentBlocks, ShownToken
from foredraft.serve.replies import Sample
from foredraft.serve.scored_text import Offsets, ScoredText, TokenTexts, spelled
from foredraft.serve.tools import Tools
from tests.support.checkpoints import tiny_tokenizer
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.replies import CALL, read_tool
from tests.support.strings import sentencepiece, tokenizer_of

VOCABULARY = 384
END = 2  # </s>
EMOJI = "\N{GRINNING FACE}"
TEXT = f"{EMOJI} a b, \u6f22\u5b57 of the tokens{EMOJI}{EMOJI} and the rest"
CALLING = f"Two a files{EMOJI}.\n" + CALL % "a" + "\n" + CALL % "b" + "\nDone."


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level: most characters beyond ASCII are several tokens."""
    return Tokenizer(tiny_tokenizer(VOCABULARY))


@functools.cache
def with_runs() -> Tokenizer:
    """SentencePiece: byte tokens, whose texts come in runs."""
    return Tokenizer(tokenizer_of(sentencepiece()))


def ids_of(text: str, of: Tokenizer | None = None) -> list[int]:
    return (of or tokenizer()).encode(text, add_special_tokens=False)


def output_of(buffer: TextBuffer, reason: str) -> Output:
    return Output(
        text=buffer.text, token_ids=list(buffer.tokens), origins=["target"] * len(buffer.tokens),
        finish_reason=reason, seed=0, sample=0, prompt_tokens=1, stats=Stats(), pieces=list(buffer.pieces),
    )  # fmt: skip


def pieces(
    ids: list[int], sizes: list[int], stops: tuple[str, ...] = (), *, hides: bool = True, of: Tokenizer
) -> Iterator[Piece]:
    """Yield the pieces of a text as an engine gives them: so many tokens at a time, and the text they settle."""
    buffer = TextBuffer(lambda: of.detokenizer(skip_special=hides), stops)
    at = turn = 0
    while True:
        new = ids[at : at + sizes[turn % len(sizes)]]
        read = buffer.push(new, ended=new[-1:] == [END])
        at, turn = at + read, turn + 1
        over = at == len(ids) or buffer.stopped_by is not None
        if over:
            buffer.finish()
        parts = buffer.release(at)
        yield Piece(
            "".join(text for _, text in parts), new[:read], ["target"] * read, parts=parts,
            logprobs=[Score(id, -1.0, -1.0, [(id, -1.0)], []) for id in new[:read]],
            output=output_of(buffer, "eos" if ids[at - 1] == END else "stop") if over else None,
        )  # fmt: skip
        if over:
            return


def told(
    ids: list[int], sizes: list[int], tools: Tools | None = None, *, of: Tokenizer | None = None, **how: Any
) -> tuple[str, str, list[tuple[str, list[ShownToken]]]]:
    """Return the text, its content, and what each step of a stream adds: content, and the tokens told with it."""
    of, hides = of or tokenizer(), how.get("hides", True)
    sample = Sample(0, ContentBlocks(tools), ScoredText(TokenTexts(of, VOCABULARY), hides=hides))
    parts = []
    for piece in pieces(ids, sizes, of=of, **how):
        part = sample.take([piece])
        content = "".join(
            step.text for step in part.steps if step.kind == "delta" and step.block.call is None
        )
        parts.append((content, part.shown))
    assert sample.output is not None
    return sample.output.text or "", sample.blocks.content, parts


def texts(tokens: list[ShownToken]) -> str:
    return "".join(token.text for token in tokens)


def data(tokens: list[ShownToken]) -> bytes:
    return b"".join(token.data for token in tokens)


SIZES = [[1], [2], [3], [1, 5, 2], [100]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("end", [[], [END]], ids=["length", "end"])
def test_the_tokens_of_each_part_are_its_text(sizes: list[int], end: list[int]) -> None:
    text, content, parts = told([*ids_of(TEXT), *end], sizes)
    assert text == content == TEXT
    for added, tokens in parts:
        assert (texts(tokens), data(tokens)) == (added, added.encode())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("stop", ["kens", " of", "b, \u6f22", EMOJI * 2, "t", "no such"])
def test_a_stop_string_cuts_the_tokens_as_it_cuts_the_text(sizes: list[int], stop: str) -> None:
    """Wherever it begins: before a token, within one, or within one that begins a character."""
    text, _, parts = told(ids_of(TEXT), sizes, stops=(stop,))
    assert text == TEXT.partition(stop)[0]
    for added, tokens in parts:
        assert (texts(tokens), data(tokens)) == (added, added.encode())
    assert "".join(added for added, _ in parts) == text


def test_a_character_that_a_limit_cuts_is_not_told() -> None:
    whole = ids_of(f"the {EMOJI}")
    for count in range(1, len(whole)):
        text, _, parts = told(whole[:count], [1])
        tokens = [each for _, more in parts for each in more]
        assert (texts(tokens), data(tokens)) == (text, text.encode())


@pytest.mark.parametrize("hides", [True, False])
def test_special_tokens_are_told_where_the_text_has_them(hides: bool) -> None:
    ids = [*ids_of("a b"), 0, *ids_of(f"{EMOJI} c"), END]
    text, _, parts = told(ids, [2], hides=hides)
    tokens = [each for _, more in parts for each in more]
    assert texts(tokens) == text == (f"a b{EMOJI} c" if hides else f"a b<pad>{EMOJI} c</s>")
    assert [each.score.token_id for each in tokens] == [id for id in ids if not hides or id not in (0, END)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 400])
def test_tokens_of_calls_are_no_content(size: int) -> None:
    text, content, parts = told(ids_of(CALLING), [size], read_tool())
    tokens = [each for _, more in parts for each in more]
    assert text == CALLING and content == f"Two a files{EMOJI}.Done."
    assert (texts(tokens), data(tokens)) == (content, content.encode())
    assert sorted({each.block for each in tokens}) == [0, 3]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_runs_of_byte_tokens_are_told_token_by_token(sizes: list[int]) -> None:
    of, text = with_runs(), f"the cat{EMOJI}\u6f22 at{EMOJI}"
    found, _, parts = told(ids_of(text, of), sizes, of=of)
    tokens = [each for _, more in parts for each in more]
    assert texts(tokens) == found and data(tokens) == found.encode()
    assert EMOJI in [each.text for each in tokens]


def test_random_tokens_join_to_whatever_text_they_make() -> None:
    """Parts of characters that never become one are told as the text shows them."""
    dice = random.Random(0)
    for _ in range(60):
        ids = [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 30))]
        stops = tuple({dice.choice("abcdet ") + dice.choice("abcdet ") for _ in range(2)})
        text, _, parts = told(ids, [dice.randrange(1, 4)], stops=stops)
        for added, tokens in parts:
            assert texts(tokens) == added
        assert "".join(added for added, _ in parts) == text


def test_a_token_of_part_of_a_character_has_a_key_of_its_own() -> None:
    of = TokenTexts(tokenizer(), VOCABULARY)
    names = [of.name(id) for id in ids_of(EMOJI)]
    assert len(names) > 1 and len(set(names)) == len(names)
    assert all(name.startswith("bytes:\\x") for name in names)
    assert spelled(b" \xe2\x98") == "bytes: \\xe2\\x98" and spelled("\ufffd".encode()) == "\ufffd"


def offsets(prompt: list[int], sent: str | None, new: list[int]) -> tuple[list[str], list[int]]:
    of = TokenTexts(tokenizer(), VOCABULARY)
    found = Offsets(of)
    scores = [None, *(Score(id, -1.0, -1.0, [(5, -0.5)], []) for id in prompt[1:])]
    first = found.prompt(prompt, sent, scores, 1)
    more = found.logprobs([ShownToken(Score(id, -1.0, -1.0, [], []), of.name(id), of.data(id)) for id in new])
    return first["tokens"] + more["tokens"], first["text_offset"] + more["text_offset"]


def test_offsets_are_places_in_the_text() -> None:
    emoji, rest = ids_of(EMOJI), ids_of(f"{EMOJI} a b")
    tokens, places = offsets(rest, f"{EMOJI} a b", ids_of("a"))
    assert places[-1] == 5 and places[: len(emoji)] == [0] * len(emoji)
    behind = range(len(emoji), len(tokens))
    assert places[len(emoji) :] == [1 + len("".join(tokens[len(emoji) : at])) for at in behind]
    # what the tokenizer puts in front was not sent, and what was sent as ids was
    tokens, places = offsets(tokenizer().encode("ab"), "ab", ids_of("a"))
    assert (tokens, places) == (["", "a", "b", "a"], [0, 0, 1, 2])
    tokens, places = offsets(tokenizer().encode("ab"), None, ids_of("a"))
    assert (tokens, places) == (["<s>", "a", "b", "a"], [0, 3, 4, 5])
    tokens, places = offsets(tokenizer().encode("<s>ab"), "<s>ab", [])
    assert (tokens, places) == (["", "<s>", "a", "b"], [0, 0, 3, 4])


def test_the_space_that_a_tokenizer_adds_is_no_part_of_an_echo() -> None:
    of = with_runs()
    found = TokenTexts(of, of.size)
    for text in ("the cat", " the cat", f"{EMOJI}the"):
        ids = of.encode(text)
        assert b"".join(found.echoed_tokens(ids, text)).decode() == text
        assert found.echoed(ids, text) == text


def check() -> None:
    test_the_tokens_of_each_part_are_its_text([1], [END])
    test_a_stop_string_cuts_the_tokens_as_it_cuts_the_text([1], "kens")
    test_tokens_of_calls_are_no_content(1)
    test_special_tokens_are_told_where_the_text_has_them(True)


SHOWN = scored_text._shown


def tells_the_end(sound: Any) -> Any:
    """The stop token is listed among the log-probabilities."""
    end = ShownToken(Score(END, -1.0, -1.0, [], []), "</s>", b"</s>")
    return lambda self, steps, *, ended: sound(self, steps, ended=ended) + ([end] if ended else [])


def tells_all(sound: Any) -> Any:
    return lambda self, texts, *, hides, counts=False: sound(self, texts, hides=hides, counts=True)


def never_cuts(sound: Any) -> Any:
    return lambda group, *, ended: iter([ShownToken(each.score, each.own, each.data) for each in group])


MUTANTS = [
    defect("the stop token listed among log-probabilities", ScoredText.shown, tells_the_end, check),
    defect("the stop token listed, without text", ScoredText.__init__, tells_all, check),
    defect("the reply shows a token whole that a stop string cuts", SHOWN, never_cuts, check),
    defect(
        "text is handed on before its token is whole", ScoredText._count_whole,
        lambda _: lambda self: len(self._tokens), check,
    ),
    defect("markup is content", ScoredText._place, lambda _: lambda self, step: _all_content(self), check),
]  # fmt: skip


def _all_content(scored: ScoredText) -> None:
    scored._content = [(0, len(scored._text), 0)]
    scored._read = len(scored._text)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
