"""Regular expressions, JSON schemas and grammars under speculation, on the demo models. And GBNF: llama.cpp's
grammars allow the same texts here, or are refused as GBNF."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import pytest

import foredraft
from foredraft import LLM, RequestError, SamplingParams
from foredraft.constraints.gbnf import is_gbnf, lark_of
from foredraft.constraints.grammar import Grammars
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import tiny_tokenizer


def record(**properties: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


PERSON = record(
    name={"type": "string", "maxLength": 8},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    tags={"type": "array", "items": {"enum": ["a", "\u00e9\u4f60", "\U0001f642"]}, "maxItems": 2},
)
PROMPT = "def fibonacci(n):\n"
REQUESTS: list[dict[str, Any]] = [
    {},
    {"ban": ["return", "if "]},
    {"ban": ["return", "n"], "ban_mode": "rollback"},
    {"ban": ["re", "e"], "ban_whole_words": True, "ban_ignore_case": True},
    {"regex": r"[a-z_]{1,12}( [a-z_]{1,12}){3,9}\."},
    {"regex": r"[a-z]{3,8} = \d{1,3}\n", "ban": ["a", "1"]},
    {"json_schema": PERSON},
    {"json_schema": PERSON, "ban": ['a"', "12"], "ban_mode": "rollback"},
    {"json_object": True, "stop": ["}"]},
    {"choices": ["return n", "n + 1.5 (a|b)*", "yes\n"]},
    {"grammar": 'start: "def " NAME "(" NAME ")"\nNAME: /[a-z]{1,6}/', "frequency_penalty": 0.4},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return foredraft.load(policy="fixed", max_batch=6)


def fits(text: str, options: dict[str, Any]) -> bool:
    if any(phrase in text for phrase in options.get("ban", ()) if "ban_whole_words" not in options):
        return False
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    if "choices" in options:
        return text in options["choices"]
    if "grammar" in options:
        return re.fullmatch(r"def [a-z]{1,6}\([a-z]{1,6}\)", text) is not None
    if "json_schema" in options:
        jsonschema.validate(json.loads(text), options["json_schema"])
    return True


@pytest.mark.heavy
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}], ids=["greedy", "coupled"])
def test_texts_fit_and_are_those_of_plain_decoding_alone(llm: LLM, sampling: dict[str, Any]) -> None:
    """More requests than rows: rows are left and taken while others roll back or jump forward."""
    params = [
        SamplingParams(max_new_tokens=20 + 4 * place, drafter="none", **options, **sampling)
        for place, options in enumerate(REQUESTS)
    ]
    plain = [llm.generate(PROMPT, own)[0] for own in params]
    for output, options in zip(plain, REQUESTS, strict=True):
        assert output.finish_reason in ("eos", "stop", "length", "constraint")
        assert output.finish_reason != "eos" or fits(output.text or "", options), output.text
    assert sum(output.finish_reason == "eos" for output in plain) > 2
    for drafter in ("none", "draft-model", "lookup"):
        together = llm.generate([PROMPT] * len(params), [own.replace(drafter=drafter) for own in params])
        for one, other in zip(plain, together, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            assert one.finish_reason == other.finish_reason


def test_choices_are_texts_and_no_expressions(llm: LLM) -> None:
    ascii_text, others = "".join(map(chr, range(32, 127))), "\u00e9\u4f60\U0001f642"
    choices = [ascii_text, "\t\n", "a", "ab", "a.c", others, " ", "|"]
    option, pattern = SamplingParams(choices=choices).text_grammar or ("", "")
    assert option == "choices"
    for text in (*choices, "abc", "", "aa", "b"):
        assert (re.fullmatch(pattern, text) is not None) == (text in choices), text
    for choice in choices:
        [output] = llm.generate("x =", temperature=0, choices=[choice], max_new_tokens=200)
        assert (output.text, output.finish_reason) == (choice, "eos")


def test_a_class_with_a_schema_is_taken_for_its_schema(llm: LLM) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Outer(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        name: str = pydantic.Field(max_length=4)
        tag: Literal["a", "b"] | None
        model_config = pydantic.ConfigDict(extra="forbid")

    params = SamplingParams(json_schema=Outer, seed=1, max_new_tokens=200)
    assert json.loads(str(params.json_schema)) == Outer.model_json_schema()
    assert hash(params) == hash(params.replace()) and params.replace().json_schema == params.json_schema
    [output] = llm.generate("x =", params)
    assert Outer.model_validate_json(output.text or "").name is not None


def test_a_class_whose_schema_fails_is_refused() -> None:
    class Broken:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            raise TypeError("a function has no schema")

    with pytest.raises(RequestError, match=r"^json_schema has no schema \(a function has no schema\); give"):
        SamplingParams(json_schema=Broken)


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


@pytest.mark.parametrize("mode", ["mask", "rollback"])
def test_a_banned_text_never_streams(llm: LLM, mode: str) -> None:
    ban = ["return", "the ", "fib"]
    params = SamplingParams(ban=ban, ban_mode=mode, seed=1, max_new_tokens=60, ban_ignore_case=True)
    *pieces, last = llm.stream(PROMPT, params)
    text = "".join(piece.text or "" for piece in (*pieces, last))
    assert last.output is not None and text == last.output.text
    assert not any(phrase in text.lower() for phrase in ban)


@pytest.mark.parametrize("mode", ["mask", "rollback"])
@pytest.mark.parametrize("stop", [[" = "], ["b", "c", "(n"], ["onacci", "rn", "\n"]], ids=str)
def test_a_word_that_a_stop_string_completes_is_banned(llm: LLM, stop: list[str], mode: str) -> None:
    """The text ends in front of the stop string, so a whole word may end there."""
    words = ["a", "b", "fib", "fibonacci", "retu", "n", "range", "return"]
    ban: dict[str, Any] = {"ban": words, "ban_whole_words": True, "ban_mode": mode, "ban_prompt": False}
    params = SamplingParams(**ban, stop=stop, max_new_tokens=40, drafter="draft-model")
    outputs = llm.generate(PROMPT, params, n=12)
    assert any(output.finish_reason == "stop" for output in outputs)
    for output in outputs:
        assert not {*re.findall(r"\w+", output.text or "")} & {*words}, output.text


# --- GBNF -------------------------------------------------------------------------------------------------

# As https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md describes them.
LIST = """\
# a list
root ::= "[" ws (item ("," ws item)*)? "]"
item ::= name | number   # either
name ::= "\\"" [a-zA-Z_]+ "\\""
number ::= "-"? [0-9]{1,3}
ws ::= [ \\t\\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "words": ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "Yes"]),
    "JSON": (
        JSON, ["{}", '{"a": 1}', '{"a": [true, -2.5, "x\\n"], "b": {}}'],
        ["[]", '{"a"}', '{"a": 01x}', '{"a\x01": 1}'],
    ),
    "list": (LIST, ["[]", '["a",\n-12]', "[7, 123]"], ["[", "[1234]", '["1"]', "[,]"]),
    "any character": ("root ::= .{2}", ["ab", "a\n", "\n\n"], ["a", "abc"]),
    "numbered characters": (
        r'root ::= "\u00e9\x41" [\u4f60-\u4f70]', ["\u00e9A\u4f60", "\u00e9A\u4f65"], ["\u00e9A\u4f59", "eA\u4f60"],
    ),
    "names with dashes and capitals": (
        'root ::= first-name ";" lastName\nfirst-name ::= [A-Z] [a-z]*\nlastName ::= [A-Z]+', ["Ada;BYRON"],
        ["ada;BYRON", "Ada;Byron"],
    ),
    "control characters": (r'root ::= "a\x01b" [\x00-\x1f\x2d]', ["a\x01b\n", "a\x01b-"], ["ab\n", "a\x01b."]),
    "quotes and brackets": (r'root ::= "\"[" [^\]\\\n]+ "]\""', ['"[a b]"', '"[[]"'], ['"[]"', '"[\n]"']),
    "recursion": ('root ::= "(" root* ")"', ["()", "(()())"], ["(", "())"]),
    "options": ('root ::= "a"? ("b" | "c")+', ["b", "abcb"], ["a", "aab"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def codec() -> ByteCodec:
    return ByteCodec(Tokenizer(tiny_tokenizer(512)))


def allows(grammar: str, text: str, codec: ByteCodec) -> bool:
    matcher = Grammars(codec, 512, frozenset({2})).maker("grammar", grammar)()._matcher
    ids = codec.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("case", CASES)
def test_a_grammar_allows_what_llama_cpp_s_does(case: str, codec: ByteCodec) -> None:
    grammar, right, wrong = CASES[case]
    assert is_gbnf(grammar)
    for text in right:
        assert allows(grammar, text, codec), text
    for text in wrong:
        assert not allows(grammar, text, codec), text


@pytest.mark.parametrize(
    "grammar",
    ['root ::= other', 'roots ::= "a"', 'root ::= "a', "root ::= [a&&b]",
     'root ::= <[7]>', "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, r'root ::= "\q"'],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_as_gbnf(grammar: str) -> None:
    with pytest.raises(RequestError, match="^grammar is GBNF, which cannot be converted: ") as caught:
        lark_of("grammar", grammar)
    assert "\n" not in str(caught.value) and caught.value.option == "grammar"


@pytest.mark.parametrize(
    "text", ['start: "a"', '%llguidance {}\nstart: A\nA: "::="', "start: X\nX: /a ::= b/"]
)
def test_lark_is_no_gbnf(text: str) -> None:
    assert not is_gbnf(text)
