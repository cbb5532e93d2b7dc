"""The grammar of calls in llguidance's dialect, of any format; special tokens are tokens in it, not texts.

Arguments that are JSON follow their schema whole; of those in elements or in Gemma's way, the names, the
order and the types of values do, and `unheld` tells the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foredraft.constraints.grammar import WHITE_SPACE
from foredraft.serve.call_formats import QUOTE, CallFormat
from foredraft.serve.calls import admits
from foredraft.serve.schemas import ANNOTATIONS

Schema = Mapping[str, Any]
ANYTHING = r"/(.|\n)*/"
SCALARS = ("integer", "number", "boolean", "null")


class CallGrammar:
    """Rules of the calls of some tools."""

    def __init__(
        self,
        format: CallFormat,
        tools: Mapping[str, Schema],  # the parameters of each, by its name
        special: Mapping[str, int],  # ids of special tokens, by their texts
        *,
        parallel: bool,
    ) -> None:
        self.format, self.special = format, special
        self.lines: list[str] = []
        for index, (name, schema) in enumerate(tools.items()):
            id = f"{self.text(format.id)} /[a-zA-Z0-9]{{9}}/" if format.id else ""
            self.lines.append(f"tool_{index}: {self.text(name)} {id} {self.text(format.middle)} args_{index}")
            self.lines += ARGUMENTS[format.payload](self, f"args_{index}", schema)
        self.lines.append(f"body: {' | '.join(f'tool_{index}' for index in range(len(tools)))}")
        closes, between = self.text(format.closes), self.text(format.between)
        self.lines.append(f"call: {self.text(format.opens)} body {closes}")
        more = f"({between} call)*" if parallel else ""
        self._rest = f"body {closes} {more} {self.text(format.last)}"

    def whole(self, *, required: bool, answer: Schema | None) -> str:
        """Return the grammar of a text that is calls, an answer of a schema, or free up to calls.

        Args:
            required: The text is calls and nothing else.
            answer: The schema of a text without calls; None where any text is allowed.
        """
        format, lines = self.format, list(self.lines)
        lead, marker = format.first + format.opens, format.marker
        lines.append(f"calls: {self.text(lead)} {self._rest}")
        if required:
            start = "calls"
        elif answer is not None:
            lines.append(f"answer: {as_json(answer)}")
            start = "answer | calls"
        elif not marker:
            lines.append(r"FREE: /([^{ \n\t](.|\n)*)?/")
            start = "FREE | calls"
        elif any(lead.startswith(text) for text in self.special):
            lines.append(f"FREE: {without(format.marker, format.first.strip())}")
            start = "FREE | FREE calls"
        else:
            # Before the first call stands what begins all calls, or else the marker of each.
            begins = format.first.strip() or marker
            lines += [
                f"FREE: {without(format.marker, begins)}",
                f"marked[suffix={json.dumps(begins)}]: {ANYTHING}",
                f"tail: {self.text(lead[lead.index(begins) + len(begins) :])} {self._rest}",
            ]
            start = "FREE | marked tail"
        return "\n".join([f"start: {start}", *lines])

    def text(self, text: str) -> str:
        """Return a text as strings and special tokens; nothing for an empty one.

        White space at the beginning is a string of its own, because the lexer looks for the longest string.
        """
        found = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        parts = re.split(rf"({found}|^\s+)" if found else r"(^\s+)", text)
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part, ensure_ascii=False)
            for part in parts if part
        )  # fmt: skip

    def until(self, rule: str, closes: str) -> tuple[list[str], str]:
        """Return rules of any text up to one that closes it, and what stands for both."""
        begins = closes.strip()
        rest = self.text(closes[closes.index(begins) + len(begins) :])
        if any(begins.startswith(text) for text in self.special):
            return [f"{rule.upper()}: {without(begins)}"], f"{rule.upper()} {self.text(closes.lstrip())}"
        return [f"{rule}[suffix={json.dumps(begins)}]: {ANYTHING}"], f"{rule} {rest}"


def as_json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"


def without(*texts: str) -> str:
    """Return a lexeme of any text that has none of these in it, by whatever tokens it is written."""
    return " & ".join([ANYTHING, *(rf"~/(.|\n)*{pattern(each)}(.|\n)*/" for each in {*texts} - {""})])


def pattern(text: str) -> str:
    """Return a regular expression of a text, within slashes."""
    return re.escape(text).replace("/", r"\/")


def _json(grammar: CallGrammar, rule: str, schema: Schema) -> Iterator[str]:
    yield f"{rule}: {as_json(schema)}"


def _elements(grammar: CallGrammar, rule: str, schema: Schema) -> Iterator[str]:
    before, key, after = grammar.format.element
    properties = known_properties(schema)
    if properties is None:
        any_lines, value = grammar.until(f"{rule}_value", after)
        yield from any_lines
        yield f'{rule}: ({grammar.text(before)} /[^<>"\\n]{{1,128}}/ {grammar.text(key)} {value})*'
        return
    parts = []
    for index, (name, inner) in enumerate(properties.items()):
        own = f"{rule}_{index}"
        values = texts_of(inner)
        lines: list[str] = []
        if values is not None:
            value = f"({' | '.join(map(grammar.text, values))}) {grammar.text(after)}"
        elif admits(inner, "string"):
            lines, value = grammar.until(f"{own}_value", after)
        else:
            lines, value = [f"{own}_value: {as_json(with_definitions(inner, schema))}"], ""
            value = f"{own}_value {grammar.text(after)}"
        yield from lines
        yield f"{own}: {grammar.text(f'{before}{name}{key}')} {value}"
        parts.append(own if name in schema.get("required", ()) else f"{own}?")
    yield f"{rule}: {' '.join(parts) or json.dumps('')}"


def _gemma(grammar: CallGrammar, rule: str, schema: Schema) -> Iterator[str]:
    lines: list[str] = []
    quote = grammar.text(QUOTE)
    text_lines, text_rest = grammar.until("gemma_text", QUOTE)

    def value(own: str, inner: Schema) -> str:
        """Add the rules of a value; return what stands for it."""
        texts, kind = texts_of(inner), inner.get("type")
        if texts is not None:
            return f"{quote} ({' | '.join(map(grammar.text, texts))}) {quote}"
        if kind == "string":
            return "gemma_string"
        if kind in SCALARS:
            return as_json(inner)
        if kind == "array" and isinstance(inner.get("items"), Mapping):
            item = f"{own}_item"
            lines.append(f"{item}: {value(item, inner['items'])}")
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and known_properties(inner) is not None:
            members(f"{own}_members", inner)
            return f'"{{" {own}_members "}}"'
        return "gemma_any"

    def members(own: str, inner: Schema) -> None:
        """Add the rules of an object's members, of which any but the first one follows a comma."""
        properties = known_properties(inner)
        if properties is None:
            lines.append(f'{own}: (gemma_member ("," gemma_member)*)?')
            return
        for index, (name, each) in enumerate(properties.items()):
            lines.append(f"{own}_{index}: {grammar.text(name + ':')} {value(f'{own}_{index}_value', each)}")
            for first, rule in ((True, "first"), (False, "next")):
                comma = "" if first else '","'
                here = f"{comma} {own}_{index} {own}_next_{index + 1}"
                skipped = "" if name in inner.get("required", ()) else f" | {own}_{rule}_{index + 1}"
                lines.append(f"{own}_{rule}_{index}: {here}{skipped}")
        lines.extend(f'{own}_{rule}_{len(properties)}: ""' for rule in ("first", "next"))
        lines.append(f"{own}: {own}_first_0")

    members(rule, schema)
    yield from lines
    if rule == "args_0":  # once for all tools
        yield from text_lines
        yield f"gemma_string: {quote} {text_rest}"
        yield 'gemma_member: /[A-Za-z_][A-Za-z0-9_.-]*/ ":" gemma_any'
        yield f"gemma_any: gemma_string | %json {json.dumps({'type': list(SCALARS)})}"
        yield '  | "[" (gemma_any ("," gemma_any)*)? "]" | "{" (gemma_member ("," gemma_member)*)? "}"'


ARGUMENTS: dict[str, Callable[[CallGrammar, str, Schema], Iterator[str]]] = {
    "object": _json, "json": _json, "elements": _elements, "gemma": _gemma,
}  # fmt: skip


def known_properties(schema: Schema) -> Mapping[str, Schema] | None:
    """Return the properties of an object that has no others; None where they cannot be told."""
    properties = schema.get("properties")
    told = isinstance(properties, Mapping) and all(isinstance(each, Mapping) for each in properties.values())
    closed = not ({"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & schema.keys())
    closed = closed and schema.get("additionalProperties") in (None, False)
    return properties if told and closed else None


def texts_of(schema: Schema) -> list[str] | None:
    """Return the texts that a value may be; None where the schema does not list them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, Sequence) or not values or not all(isinstance(each, str) for each in values):
        return None
    return [*values]


def with_definitions(inner: Schema, root: Schema) -> Schema:
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **inner}


HELD = frozenset({"type", "enum", "const", "properties", "required", "additionalProperties", "items"})


def unheld(format: CallFormat, schema: Schema, path: str = "") -> Iterator[str]:
    """Yield the places of keywords that the grammar of arguments does not hold, though that of JSON would."""
    if format.payload not in ("elements", "gemma"):
        return
    if schema.get("additionalProperties") not in (None, False):
        yield f"{path}additionalProperties"
    for keyword, value in schema.items():
        if keyword not in HELD and keyword not in ANNOTATIONS and keyword not in ("$defs", "definitions"):
            yield f"{path}{keyword}"
        elif keyword == "type" and isinstance(value, list):
            yield f"{path}type"
        elif keyword == "items" and isinstance(value, Mapping):
            yield from unheld(format, value, f"{path}items.")
        elif keyword == "properties" and isinstance(value, Mapping):
            for name, inner in value.items():
                is_text = isinstance(inner, Mapping) and admits(inner, "string")
                if isinstance(inner, Mapping) and (format.payload == "gemma" or is_text):
                    yield from unheld(format, inner, f"{path}properties.{name}.")
