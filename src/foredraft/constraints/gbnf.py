"""GBNF: grammars in llama.cpp's notation -> llguidance's Lark dialect.

Source: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. What llguidance's converter
would read otherwise than llama.cpp is spelt here so that both mean the same. Its lexer takes the longest text
that a symbol matches, so an ambiguous grammar may allow less than in llama.cpp, never more.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from foredraft.errors import RequestError

RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.M)
LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.M)
# A comment, a literal, a class of characters, or any character.
PART = re.compile(r'#[^\r\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[^#"\[.]+|.', re.S)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.S)
NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\", '"': r"\""}
# Characters that have a meaning in a class, which the converter takes by their numbers alone.
MEANT = {"[": r"\[", "]": r"\]", "-": r"\x2d", "^": r"\x5e"}
ANY = r"([^\n] | [\n])"
SET_OPERATORS = ("&&", "--", "~~")  # within a class of a regular expression


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation.

    Examples:
        >>> is_gbnf('root ::= "yes" | "no"'), is_gbnf('start: "yes" | "no"')
        (True, False)
    """
    return RULE.search(text) is not None and LARK.search(text) is None


def lark_of(option: str, text: str) -> str:
    try:
        return gbnf_to_lark("".join(_spelled(part[0]) for part in PART.finditer(text)))
    except RecursionError:
        reason = "it is nested too deeply"
    except (GbnfToLarkError, Exception) as error:  # the converter raises bare Exception, too
        reason = str(error)
    raise RequestError(
        f"is GBNF, which cannot be converted: {reason}", option=option,
        remedy="correct it, or give the grammar in llguidance's Lark dialect",
    )  # fmt: skip


def _spelled(part: str) -> str:
    """Return a part of a grammar as the converter reads it rightly."""
    if part == ".":
        return ANY
    if part[0] == "[":
        made = ESCAPE.sub(lambda found: _in_class(_character(found)), part)
        if any(operator in made for operator in SET_OPERATORS):
            raise ValueError(f"the class {part} has one of {', '.join(SET_OPERATORS)} in it")
        return made
    return _literal(part[1:-1]) if part[0] == '"' and "\\" in part else part


def _literal(text: str) -> str:
    """Return the literal of what stands between two quotes; its control characters are classes beside it."""
    runs = [""]
    for found in re.finditer(rf"{ESCAPE.pattern}|[^\\]", text, re.S):
        character = _character(found) if found[0].startswith("\\") else found[0]
        if character not in NAMED and _is_control(character):
            runs += [_in_class(character), ""]
        else:
            runs[-1] += NAMED.get(character, character)
    made = [f"[{run}]" if place % 2 else f'"{run}"' for place, run in enumerate(runs) if run]
    return made[0] if len(made) == 1 else f"({' '.join(made)})"


def _character(escape: re.Match[str]) -> str:
    number = next((each for each in escape.groups()[:3] if each), None)
    if number is not None and int(number, 16) <= 0x10FFFF and not 0xD800 <= int(number, 16) <= 0xDFFF:
        return chr(int(number, 16))
    known = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in '\\"[]'}
    if number is None and escape[4] in known:
        return known[escape[4]]
    raise ValueError(f"{escape[0]} stands for no character")


def _in_class(character: str) -> str:
    by_number = f"\\x{ord(character):02x}" if _is_control(character) else character
    return NAMED.get(character) or MEANT.get(character) or by_number


def _is_control(character: str) -> bool:
    return character < " " or character == "\x7f"
