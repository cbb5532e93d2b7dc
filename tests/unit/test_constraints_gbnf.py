"""GBNF: llama.cpp's grammars allow the same texts here, or are refused as GBNF."""

from __future__ import annotations

import pytest

from foredraft.constraints.gbnf import is_gbnf, lark_of
from foredraft.constraints.grammar import Grammars
from foredraft.errors import RequestError
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from tests.support.checkpoints import tiny_tokenizer

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
