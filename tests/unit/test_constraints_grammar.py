"""Regular expressions, JSON schemas and grammars under speculation, on the demo models."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import pytest

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.model.byte_codec import ByteCodec

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "\u00e9\u4f60", "\U0001f642"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[a-z]{3,8} = \d{1,3}\n"},
    "json_schema": {"json_schema": PERSON},
    "choices": {"choices": ["n + 1", "n + 1.5 (a|b)*", "yes\n"]},
    "grammar": {"grammar": 'start: "def " NAME "(" NAME ")"\nNAME: /[a-z]{1,6}/'},
    "regex and ban": {"regex": r"[a-z]{3,8} = \d{1,3}\n", "ban": ["a", "1"]},
    "json_schema and rollback": {"json_schema": PERSON, "ban": ["a\"", "12"], "ban_mode": "rollback"},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed")


def fits(text: str, options: dict[str, Any]) -> bool:
    if any(phrase in text for phrase in options.get("ban", ())):
        return False
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    if "choices" in options:
        return text in options["choices"]
    if "grammar" in options:
        return re.fullmatch(r"def [a-z]{1,6}\([a-z]{1,6}\)", text) is not None
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"] and len(found["name"]) <= 8 and 0 <= found["age"] <= 150
        and all(tag in PERSON["properties"]["tags"]["items"]["enum"] for tag in found["tags"])
    )  # fmt: skip


@pytest.mark.parametrize("options", GRAMMARS.values(), ids=GRAMMARS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}], ids=["greedy", "coupled"])
def test_the_text_fits_and_is_that_of_plain_decoding(
    llm: LLM, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_new_tokens=120, **options, **sampling)
    prompts = ["x ="]
    plain = llm.generate(prompts, params.replace(drafter="none"), n=1 if params.greedy else 2)
    for drafter in ("draft-model", "lookup"):
        drafted = llm.generate(prompts, params.replace(drafter=drafter), n=1 if params.greedy else 2)
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    for output in plain:
        assert output.finish_reason in ("eos", "length", "constraint")
        assert output.finish_reason != "eos" or fits(output.text or "", options), output.text


def test_choices_are_texts_and_no_expressions(llm: LLM) -> None:
    """Characters that have a meaning in a regular expression stand for themselves."""
    choices = [
        "".join(map(chr, range(32, 127))),
        "\t\n",
        "a",
        "ab",
        "a.c",
        "\u00e9\u4f60\U0001f642",
        " ",
        "|",
    ]
    option, pattern = SamplingParams(choices=choices).text_grammar or ("", "")
    assert option == "choices"
    for text in (*choices, "abc", "", "aa", "b"):
        assert (re.fullmatch(pattern, text) is not None) == (text in choices), text
    for choice in choices:
        [output] = llm.generate("x =", temperature=0, choices=[choice], max_new_tokens=200)
        assert (output.text, output.finish_reason) == (choice, "eos")


def test_a_class_with_a_schema_is_taken_for_its_schema(llm: LLM) -> None:
    """Models of pydantic are such classes."""
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        tag: Literal["a", "b"]
        model_config = pydantic.ConfigDict(extra="forbid")

    class Outer(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        name: str = pydantic.Field(max_length=4)
        inner: Inner | None
        model_config = pydantic.ConfigDict(extra="forbid")

    class Other:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"const": "other"}

    params = SamplingParams(json_schema=Outer, seed=1, max_new_tokens=200)
    assert json.loads(str(params.json_schema)) == Outer.model_json_schema()
    assert hash(params) == hash(params.replace()) and params.replace().json_schema == params.json_schema
    [output] = llm.generate("x =", params)
    assert Outer.model_validate_json(output.text or "").name is not None
    [output] = llm.generate("x =", temperature=0, json_schema=Other)
    assert output.text == '"other"'


def test_a_class_whose_schema_fails_is_refused() -> None:
    class Broken:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            raise TypeError("a function has no schema")

    with pytest.raises(RequestError, match=r"^json_schema has no schema \(a function has no schema\); give"):
        SamplingParams(json_schema=Broken)


MANY: dict[str, dict[str, Any]] = {
    "numbers": {
        "type": "object",
        "properties": {
            "whole": {"type": "integer", "minimum": -5, "maximum": 1000},
            "part": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
            "exactly": {"const": 3},
        },
        "required": ["whole", "part", "exactly"],
        "additionalProperties": False,
    },
    "unicode": {
        "type": "object",
        "properties": {
            "\u540d\u524d": {"type": "string", "pattern": "^[\u3042-\u3093]{1,4}$"},
            "\U0001f642": {"enum": ["\u00e9", "\U0001f468\u200d\U0001f469", 'a\\"b', None, True]},
        },
        "required": ["\u540d\u524d", "\U0001f642"],
        "additionalProperties": False,
    },
    "nested": {
        "$defs": {
            "leaf": {"type": "string", "maxLength": 3},
            "tree": {
                "type": "object",
                "properties": {
                    "is": {"$ref": "#/$defs/leaf"},
                    "has": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/leaf"}},
                },
                "required": ["is", "has"],
                "additionalProperties": False,
            },
        },
        "type": "array",
        "items": {"$ref": "#/$defs/tree"},
        "minItems": 1,
        "maxItems": 3,
    },
    "choices": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "kind": {"const": "circle"},
                    "radius": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["kind", "radius"],
                "additionalProperties": False,
            },
            {
                "type": "array",
                "prefixItems": [{"type": "boolean"}, {"type": "null"}],
                "items": False,
                "minItems": 2,
            },
            {"type": "string", "minLength": 2, "maxLength": 6},
        ]
    },
    "person": PERSON,
}


@pytest.mark.slow
def test_hundreds_of_samples_are_valid_under_their_schemas() -> None:
    """By another library; 100 of each schema, a third with a draft model, a third with lookup, a third plain."""
    llm = foredraft.load()
    ended, cut = 0, 0
    for schema in MANY.values():
        check = jsonschema.Draft202012Validator(schema)
        for drafter, n in (("draft-model", 34), ("lookup", 33), ("none", 33)):
            params = SamplingParams(json_schema=schema, max_new_tokens=300, drafter=drafter, temperature=1)
            for output in llm.generate("value = ", params, n=n):
                if output.finish_reason == "length":
                    cut += 1
                    continue
                assert output.finish_reason == "eos"
                check.validate(json.loads(output.text or ""))
                ended += 1
    assert ended + cut == 500
    assert cut <= 25


def test_samples_of_a_schema_are_valid(llm: LLM) -> None:
    params = SamplingParams(json_schema=PERSON, max_new_tokens=300, drafter="draft-model")
    outputs = llm.generate("{", params, n=20)
    ended = [output for output in outputs if output.finish_reason == "eos"]
    assert len(ended) >= 19
    assert all(fits(output.text or "", {"json_schema": PERSON}) for output in ended)


def test_forced_tokens_are_drafted_without_a_drafter(llm: LLM) -> None:
    params = SamplingParams(temperature=0, regex="return the quick brown fox[a-z]", drafter="none")
    [output] = llm.generate("x", params, trace=True)
    assert output.text.startswith("return the quick brown fox")
    assert output.stats.mean_accepted_length > 2
    assert {each.drafter for each in output.trace or []} == {"jump-forward", None}


def test_a_trace_counts_the_tokens_allowed(llm: LLM) -> None:
    [output] = llm.generate("x", SamplingParams(temperature=0, regex="[0-3]", drafter="none"), trace=True)
    assert [each.legal for each in output.trace or []] == [[4], [1]]
    [free] = llm.generate("x", SamplingParams(temperature=0, max_new_tokens=2, drafter="none"), trace=True)
    assert [each.legal for each in free.trace or []] == [None, None]


def test_a_text_without_a_continuation_ends_with_its_constraint(llm: LLM) -> None:
    params = SamplingParams(temperature=0, regex="ab|cd", ban=["b", "d"], max_new_tokens=8)
    [output] = llm.generate("x", params)
    assert output.finish_reason == "constraint"
    assert output.stopped_by == "ban and regex allow no token together"
    rolled = SamplingParams(temperature=0, regex="ab|ac", ban=["a"], ban_mode="rollback", max_new_tokens=8)
    [output] = llm.generate("x", rolled)
    assert (output.finish_reason, output.text) == ("constraint", "")


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "the end is barred": {"regex": "[0-3]", "min_new_tokens": 5},
    "the end is barred behind a schema": {"json_schema": {"const": 7}, "min_new_tokens": 9},
    "a character that two constraints complete in two ways": {"regex": "for\u2013x", "ban": ["for"], "ban_whole_words": True},
}  # fmt: skip


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_dead_end_ends_the_text_at_once(llm: LLM, name: str, drafter: str) -> None:
    """No token without text fills up what remains."""
    options = DEAD_ENDS[name]
    params = SamplingParams(temperature=0, max_new_tokens=30, drafter=drafter, **options)
    [output] = llm.generate("x = ", params)
    assert output.finish_reason == "constraint"
    assert output.stopped_by in (
        "regex and min_new_tokens allow no token together",
        "json_schema and min_new_tokens allow no token together",
        "ban: every token would complete banned text",  # taken back to where the word begins
    )
    assert len(output.token_ids) < 6
    assert not llm.tokenizer or not llm.tokenizer.special.intersection(output.token_ids)
    assert "\ufffd" not in (output.text or "")


@pytest.mark.parametrize("drafter", ["none", "draft-model", "lookup"])
def test_a_whole_word_is_banned_without_dead_ends(llm: LLM, drafter: str) -> None:
    """Behind a banned word all characters that begin with E2 80 are boundaries."""
    assert llm.tokenizer is not None
    codec = ByteCodec(llm.tokenizer)
    openings = [id for id, text in enumerate(codec.table(4096)) if text == b"\xe2"]
    params = SamplingParams(
        temperature=0, max_new_tokens=12, drafter=drafter, ban=["x"], ban_whole_words=True,
        logit_bias=dict.fromkeys(openings, 50.0),
    )  # fmt: skip
    [output] = llm.generate("return x", params)
    assert output.finish_reason in ("length", "eos")
    assert not re.match(r"\W|$", output.text or ""), "x is no word of its own"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"regex": "[a-"}, "unclosed character class, at character 1 of '[a-'"),
        ({"json_schema": {"type": "object", "not": {}}}, '"not"'),
        ({"json_schema": {"type": "string", "format": "wibble"}}, "wibble"),
        ({"grammar": 'start: "a" foo'}, "foo"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_library_refuses_is_named(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate("x", SamplingParams(**options))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"ban": [""]}, {"ban": ["a\ud800"]}, {"ban": 3}, {"ban_mode": "no"}, {"regex": 3}, {"json_schema": "{"},
        {"json_schema": 3}, {"regex": "a", "json_object": True}, {"regex": "a", "ignore_eos": True},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**options)


def test_a_ban_of_every_character_leaves_no_character(llm: LLM) -> None:
    assert llm.tokenizer is not None
    every = sorted({llm.tokenizer.text([id], False)[:1] for id in range(4096)} - {"", "\ufffd"})
    params = SamplingParams(ban=every, min_new_tokens=1, max_new_tokens=3)
    [output] = llm.generate("x", params)
    assert not set(output.text or "") & set(every)


def test_a_banned_text_never_streams(llm: LLM) -> None:
    phrases = ["return", "the ", "fib"]
    for mode in ("mask", "rollback"):
        for seed in range(3):
            params = SamplingParams(
                ban=phrases, ban_mode=mode, seed=seed, max_new_tokens=60, ban_ignore_case=True
            )
            pieces = list(llm.stream("def fibonacci(n):\n", params))
            text = "".join(piece.text or "" for piece in pieces)
            last = pieces[-1].output
            assert last is not None
            assert text == last.text
            assert not any(phrase in text.lower() for phrase in phrases)
