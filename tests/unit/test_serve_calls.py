"""Calls in every format: what is written is read, however it is cut, under the grammar that makes it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from foredraft.serve import call_formats
from foredraft.serve.call_formats import FORMATS, CallFormat
from foredraft.serve.call_grammar import CallGrammar, unheld
from foredraft.serve.calls import CallReader, is_object

NAMES = {id(value): name for name, value in vars(call_formats).items() if isinstance(value, CallFormat)}
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: NAMES[id(format)])
RECORD = {
    "type": "object",
    "properties": {"k": {"type": "boolean"}, "z": {"type": "string"}},
    "required": ["z"],
}
TOOLS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object", "required": ["q", "e"], "additionalProperties": False,
        "properties": {
            "q": {"type": "string", "maxLength": 40}, "e": {"enum": ["one", "two"]}, "n": {"type": "integer"},
            "l": {"type": "array", "items": {"type": "string"}}, "o": {**RECORD, "additionalProperties": False},
        },
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    "any": {"type": "object"},
}  # fmt: skip
SAID = [
    ("look", {"q": 'a "b" <c>\n  d{}[]', "e": "two"}),
    ("stop", {}),
    ("look", {"q": "x: 1, y", "e": "one"}),
]
Found = tuple[list[tuple[str, str]], str]


def written(format: CallFormat) -> str:
    """Return three calls, between texts where the format allows any."""
    all_ = format.between.join(format.write(name, given) for name, given in SAID)
    before, after = ("Hi.\n", "\nBye.") if format.marker else ("", "")
    return f"{before}{format.first}{all_}{format.last}{after}"


def read(format: CallFormat, text: str, cuts: Iterable[int] = ()) -> Found:
    reader, places = CallReader(format, TOOLS), [0, *cuts, len(text)]
    events = [event for a, b in pairwise(places) for event in reader.read(text[a:b])]
    events += reader.end()
    streamed = dict.fromkeys(range(len(reader.calls)), "")
    for call, piece in events:
        if call is not None:
            streamed[call.index] += piece
    assert [call.arguments for call in reader.calls] == [*streamed.values()]
    content = "".join(piece for call, piece in events if call is None)
    return [(call.name, call.arguments) for call in reader.calls], content


@every_format
def test_what_is_written_is_read_wherever_it_is_cut(format: CallFormat) -> None:
    text = written(format)
    found = read(format, text)
    assert [(name, json.loads(given)) for name, given in found[0]] == SAID
    assert found[1] == ("Hi.Bye." if format.marker else "")
    rng = random.Random(1)
    for _ in range(100):
        cuts = sorted(rng.sample(range(len(text)), rng.randint(1, 8)))
        assert read(format, text, cuts) == found, cuts
    assert read(format, text, range(1, len(text))) == found


@every_format
def test_texts_of_parts_of_calls_have_one_meaning(format: CallFormat) -> None:
    parts = [
        "<tool_call>", "<function=look>", "{", "}", "[", "]", '"name"', "look", "stop", "[ARGS]", "<parameter=q>", "\n",
        " ", '"arguments": {"q": "x"}', "</tool_call>", "hello", "<|tool_call>", "call:", '<|"|>', ",", "<arg_key>", "q",
        "</arg_key>", '{"name": "look", "arguments": {"q": "1"}}', '{"name": "none", "arguments": {}}', format.opens,
        format.closes, format.middle, format.marker, format.write("look", {"q": "x"}), format.write("none", {}),
    ]  # fmt: skip
    rng = random.Random(2)
    for _ in range(400):
        text = "".join(rng.choices(parts, k=rng.randint(1, 10)))
        assert read(format, text) == read(format, text, range(1, len(text))), text


@every_format
def test_a_call_of_no_tool_is_content(format: CallFormat) -> None:
    text = "".join((format.first + format.write("none", {"q": "x"}) + format.last).split())
    calls, content = read(format, text)
    for noise in format.noise:
        text = text.replace("".join(noise.split()), "")
    assert not calls and content == text


SPECIAL = [
    "<end>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
]  # fmt: skip
IDS = {text: 256 + index for index, text in enumerate(SPECIAL) if index}


class Bytes:
    """A vocabulary of bytes and special tokens."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self) -> None:
        self.special_token_ids = [256 + index for index in range(len(SPECIAL))]
        self.tokens = [bytes([i]) for i in range(256)] + [b"\xff[%d]" % id for id in self.special_token_ids]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


SIZE = 256 + len(SPECIAL)
TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=SIZE, slices=[])


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def tokens(text: str, special: dict[str, int]) -> list[int]:
    found = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({found})", text) if found else [text]
    return [id for part in parts for id in ([special[part]] if part in special else part.encode())]


def shown(ids: Sequence[int]) -> str:
    return b"".join(bytes([i]) if i < 256 else SPECIAL[i - 256].encode() for i in ids).decode(
        "utf-8", "replace"
    )


@pytest.mark.parametrize("special", [IDS, {}], ids=["special tokens", "texts"])
@every_format
def test_the_grammar_allows_calls_and_no_others(format: CallFormat, special: dict[str, int]) -> None:
    text = written(format).removesuffix("\nBye.")
    if format.id:
        text = text.replace(format.middle, f"{format.id}abcDEF123{format.middle}")
    grammar = CallGrammar(format, TOOLS, special, parallel=True)
    free, required = (grammar.whole(required=must, answer=None) for must in (False, True))
    for source, allowed in ((free, text), (required, text.removeprefix("Hi.\n"))):
        ids = tokens(allowed, special)
        made = matcher(source)
        assert made.try_consume_tokens(ids) == len(ids) and made.is_accepting()
    wrong = tokens(text.removeprefix("Hi.\n").replace("two", "six", 1), special)
    assert matcher(required).try_consume_tokens(wrong) < len(wrong)
    one = CallGrammar(format, TOOLS, special, parallel=False).whole(required=True, answer=None)
    ids = tokens(text.removeprefix("Hi.\n"), special)
    assert matcher(one).try_consume_tokens(ids) < len(ids)
    if format.marker:
        ids = tokens("No call.", special)
        assert matcher(free).try_consume_tokens(ids) == len(ids)
        ids = tokens(f"{format.first}{format.opens}none", {})  # the letters of a call, by whatever tokens
        assert matcher(free).try_consume_tokens(ids) < len(ids)
    if format.payload == "gemma":
        begun = tokens(f'{format.opens}look{format.middle}q:<|"|>a', special)
        ids = [*begun, *tokens('<|"|>b', {})]
        closed = not special  # its letters close a text only where no token does
        assert (matcher(required).try_consume_tokens(ids) == len(ids) - 1) is closed
        assert matcher(required).try_consume_tokens(ids[:-1]) == len(ids) - (1 if closed else 2)


@pytest.mark.parametrize("special", [IDS, {}], ids=["special tokens", "texts"])
@every_format
def test_what_the_grammar_makes_is_read_as_calls(format: CallFormat, special: dict[str, int]) -> None:
    source = CallGrammar(format, TOOLS, special, parallel=True).whole(required=True, answer=None)
    rng, whole = random.Random(3), 0
    likely = {*b"abz{[:<>/=\n \\truefalsnlok0123,"}
    for _ in range(20):
        made, ids = matcher(source), list[int]()
        while len(ids) < 400 and not made.is_stopped():
            bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:SIZE])
            ends = [each for each in allowed if each >= 256 or each in b'"]}']
            some = ends if ends and rng.random() < 0.3 else [each for each in allowed if each in likely]
            id = int(rng.choice(some or list(allowed)))
            if id == Bytes.eos_token_id:
                break
            assert made.try_consume_tokens([id]) == 1
            ids.append(id)
        if made.is_accepting():
            whole += 1
            calls, content = read(format, shown(ids))
            assert calls and not content.strip() and all(is_object(given) for _, given in calls), shown(ids)
    assert whole


def test_what_a_grammar_does_not_hold_is_named() -> None:
    schema = {
        "type": "object", "title": "T", "minProperties": 1,
        "properties": {"a": {"type": "string", "pattern": "x"}, "b": {"type": "integer", "minimum": 3}},
    }  # fmt: skip
    assert [*unheld(call_formats.QWEN, schema)] == ["minProperties", "properties.a.pattern"]
    assert [*unheld(call_formats.GEMMA, schema)] == [
        "minProperties",
        "properties.a.pattern",
        "properties.b.minimum",
    ]
    assert [*unheld(call_formats.HERMES, schema)] == [*unheld(call_formats.MINISTRAL, schema)] == []
    inner = {"items": {"type": ["string", "null"], "minLength": 2}, "additionalProperties": {}}
    assert [*unheld(call_formats.GEMMA, inner)] == ["additionalProperties", "items.type", "items.minLength"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("True", True), ("true", True), ("['a']", ["a"]), ('{"k": null}', {"k": None}), ("half", "half"), ("", "")],
)  # fmt: skip
def test_a_value_of_an_element_is_text_only_where_it_is_nothing_else(text: str, value: object) -> None:
    element = f"<tool_call>\n<function=any>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [(_, given)], _ = read(call_formats.QWEN, element)
    assert json.loads(given) == {"p": value}
    [(_, given)], _ = read(call_formats.QWEN, element.replace("=any", "=look").replace("=p>", "=q>"))
    assert json.loads(given) == {"q": text}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "integer"]}, "5", "5"), ({"enum": ["5", 6]}, "5", "5"), ({"const": 5}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None), ({"type": "string"}, "null", "null"),
    ],
)  # fmt: skip
def test_a_value_whose_schema_admits_text_is_text(schema: dict[str, Any], text: str, value: object) -> None:
    reader = CallReader(call_formats.QWEN, {"f": {"properties": {"p": schema}}})
    reader.read(call_formats.QWEN.write("f", {"p": text}))
    assert json.loads(reader.calls[0].arguments) == {"p": value}


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('$ref:<|"|>x<|"|>,a b:{1:[true,null]}', '{"$ref": "x", "a b": {"1": [true, null]}}'),
        ('"q":<|"|>a}<tool_call|>, b:c<|"|>', '{"q": "a}<tool_call|>, b:c"}'),
        ("no such thing", "{no such thing}"),
    ],
)
def test_arguments_of_gemma_are_json_and_end_outside_texts(given: str, arguments: str) -> None:
    text = f"<|tool_call>call:look{{{given}}}<tool_call|> Bye."
    assert read(call_formats.GEMMA, text) == read(call_formats.GEMMA, text, range(1, len(text)))
    assert read(call_formats.GEMMA, text) == ([("look", arguments)], "Bye.")


@every_format
def test_a_call_that_a_limit_cut_keeps_what_was_written(format: CallFormat) -> None:
    text = format.first + format.write("look", {"q": "abcdef"})
    [(name, given)], content = read(format, text[: text.index("def")])
    assert (name, content) == ("look", "") and "abc" in given and not is_object(given)


def test_null_as_the_arguments_of_a_call_is_an_empty_object() -> None:
    text = '<tool_call>{"name": "stop", "arguments": null}</tool_call>'
    assert read(call_formats.HERMES, text) == ([("stop", "{}")], "")
