"""Calls: the reader of calls in a text that grows, one parser for each way of writing arguments.

A way of writing fits a template if the calls that the template tells are read as these calls; where none
does, the template does not describe the tools. However a text is cut into pieces, it has the same calls.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from foredraft.decode.thinking import overlap
from foredraft.serve.call_formats import ID_LENGTH, QUOTE, CallFormat, Payload, loose

BETWEEN = " \t\r\n,;"  # characters from one call of a list to the next
LONGEST_HEAD = 1024  # characters from a marker to the arguments: names have at most 128
Schema: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class ParsedToolCall:
    """One call."""

    index: int  # among the calls of its text
    name: str  # of the tool
    arguments: str = ""  # JSON, so far
    id: str = field(default_factory=lambda: secrets.token_hex(ID_LENGTH)[:ID_LENGTH])  # a fresh one


# A call and what its arguments get, "" where it has just begun; None and further content.
Event: TypeAlias = tuple[ParsedToolCall | None, str]


class CallReader:
    """Reads one text piece by piece."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Schema], most: int | None = None) -> None:
        self._format, self._schemas, self._most = format, schemas, most
        self.calls: list[ParsedToolCall] = []  # found so far
        self._text = ""  # not yet decided
        self._state: Literal["content", "call", "after"] = "content" if format.marker else "after"
        self._parser = PARSERS[format.payload](format, schemas)
        self._call: ParsedToolCall | None = None  # whose arguments are being read
        self._before = ""  # what stood before the call that is being read
        self._listed = not format.marker  # a call may follow without a marker
        self._follows_call = False  # no content has come since the last call
        self._cut = False  # a limit has ended the text

    def read(self, piece: str) -> list[Event]:
        """Return what a further piece of the text shows."""
        self._text += piece
        return self._settle(ended=False)

    def end(self, *, cut: bool = False) -> list[Event]:
        """Return what is left at the end of the text."""
        self._cut = cut
        return self._settle(ended=True)

    def _settle(self, *, ended: bool) -> list[Event]:
        events: list[Event] = []
        going = True
        while going and (self._text or ended):
            read = {"content": self._content, "call": self._read_call, "after": self._after}[self._state]
            going = read(events, ended)
        return events

    def _show(self, events: list[Event], length: int) -> None:
        shown, self._text = self._text[:length], self._text[length:]
        if shown:
            self._follows_call = False
            events.append((None, shown))

    def _content(self, events: list[Event], ended: bool) -> bool:
        if self._follows_call:  # white space around calls is no content
            self._text = self._text.lstrip()
        format = self._format
        if not format.marker:
            self._show(events, len(self._text))
            return False
        marks = (format.marker, *format.noise)
        places = [(self._text.find(mark), mark) for mark in marks if mark in self._text]
        at, found = min(places, default=(len(self._text), ""))
        begun = 0
        if not found and (not ended or self._cut):
            begun = max(overlap(self._text, mark) for mark in marks)
        before = self._text[: at - begun]
        self._show(events, len(before if ended and not found and not begun else before.rstrip()))
        if ended and begun:
            self._text = ""
        if not found:
            return False
        end = self._text.index(found) + len(found)
        before, self._text = self._text[:end], self._text[end:]
        if found == format.marker:
            self._begin_call(before)
            self._state = "after" if format.is_list else "call"
            self._listed = format.is_list
        else:
            self._follows_call = True
        return True

    def _after(self, events: list[Event], ended: bool) -> bool:
        """Read what stands before a call where nothing marks it, or behind a call."""
        format = self._format
        if not self._listed:
            rest, closing = self._text.lstrip(), format.closing
            if closing.startswith(rest):
                if ended:
                    self._text = ""
                return False
            self._text, self._state = rest.removeprefix(closing), "content"
            return True
        begun, rest = self._call is not None, self._text.lstrip(BETWEEN)
        rest = rest.removeprefix(format.last if begun else "[" if format.last else "")
        rest = rest if begun else rest.lstrip()
        if not rest and not ended:
            return False
        if not rest and self._cut and (self._before + self._text).strip():  # what stands before a call
            self._text = ""
            return False
        if rest.startswith("{"):
            self._begin_call(("" if begun else self._before) + self._text.removesuffix(rest))
            self._text, self._state = rest, "call"
            return True
        self._listed, self._state = False, "content"
        if begun:
            self._text = rest
        elif format.marker:
            self._text = self._before + self._text
            self._show(events, len(self._before))
        return True

    def _begin_call(self, before: str) -> None:
        """Begin to read a call; `before` is content if it turns out to be none."""
        self._before, self._call = before, None
        self._parser = PARSERS[self._format.payload](self._format, self._schemas)

    def _read_call(self, events: list[Event], ended: bool) -> bool:
        parser = self._parser
        try:
            end = parser.read(self._text)
            if self._call is None and parser.name is not None:
                if parser.name not in self._schemas or len(self.calls) == self._most:
                    raise NoCall
                self._call = ParsedToolCall(len(self.calls), parser.name)
                self.calls.append(self._call)
                events.append((self._call, ""))
        except NoCall:
            return self._no_call(events)
        if self._call is None:
            if not ended:
                return False
            if self._cut and parser.begins(self._text):  # a beginning of a call is no content
                self._text = ""
                return False
            return self._no_call(events)
        if end is None and ended:
            parser.cut(self._text)
        if more := parser.arguments[len(self._call.arguments) :]:
            self._call.arguments += more
            events.append((self._call, more))
        if end is None:
            return False
        self._text, self._state, self._follows_call = self._text[end:], "after", True
        return True

    def _no_call(self, events: list[Event]) -> bool:
        """Take what begins as a call does for content."""
        self._listed, self._state = False, "content"
        self._text = self._before + self._text
        self._show(events, max(1, len(self._before)))
        return True


class NoCall(Exception):
    """A text is no call after all."""


class Parser:
    """Reads one call, behind its marker, in a text that grows."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Schema]) -> None:
        self.format, self.schemas = format, schemas
        self.name: str | None = None
        self.arguments = ""  # as JSON, so far
        self._at = 0  # where the arguments begin, and then what was read of them

    def read(self, text: str) -> int | None:
        """Return where the call ends, before what closes it; None while it is open.

        It may raise NoCall as long as the name is not known.
        """
        if self.name is None:
            head = self.format.head.match(text[:LONGEST_HEAD])
            if head is None:
                if len(text) >= LONGEST_HEAD:
                    raise NoCall
                return None
            self.name, self._at = head["name"], head.end()
        return self._arguments(text)

    def _arguments(self, text: str) -> int | None:
        raise NotImplementedError

    def begins(self, text: str) -> bool:
        """Return whether a text that a limit has cut may have been a call."""
        return True

    def cut(self, text: str) -> None:
        """Take what the arguments have at the end of a text that does not end the call."""


class JsonParser(Parser):
    """A name, and arguments that are JSON."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Schema]) -> None:
        super().__init__(format, schemas)
        self._scan: ObjectScan | None = None

    def _arguments(self, text: str) -> int | None:
        if self._scan is None:
            self._scan = ObjectScan(self._at)
        end = self._scan.end(text)
        self.arguments = text[self._at : end]
        return end


HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
KEYS = ("arguments", "parameters")
BEGINNING = '{"name":"'  # of every call that is an object, white space aside


class ObjectParser(Parser):
    """An object that has the name and the arguments, in either order, and perhaps further members."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Schema]) -> None:
        super().__init__(format, schemas)
        self._scan = ObjectScan()

    def read(self, text: str) -> int | None:
        end = self._scan.end(text)
        if self.name is None and (head := HEAD.match(text)) is not None:
            self.name, self._at = json.loads(head[1], strict=False), head.end()
        if self.name is not None:
            if self._at:
                self.arguments = text[self._at : self._scan.value_end or end]
            return end
        if end is None:
            begun = "".join(text[: 4 * len(BEGINNING)].split())
            if self.format.marker or begun.startswith(BEGINNING) or BEGINNING.startswith(begun):
                return None
            raise NoCall
        found = parsed_object(text[:end])
        name, given = found.get("name"), found.get("arguments", found.get("parameters", {}))
        if not isinstance(name, str):
            raise NoCall
        self.name = name
        # some models write them as a string that holds JSON
        self.arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        return end

    def begins(self, text: str) -> bool:
        given = "".join(text.split())
        if self.format.marker:
            return given[:1] in ("", "{")
        heads = (f'{{"name":{json.dumps(name)},"{key}":{{' for name in self.schemas for key in KEYS)
        return any(head.startswith(given) for head in heads)


CDATA = "<![CDATA["  # before texts that some templates escape so


class ElementsParser(Parser):
    """A name, and an element for each argument, whose value is text or JSON."""

    def _arguments(self, text: str) -> int | None:
        assert self.name is not None
        while True:
            key, after = self.format.element[1:]
            rest = text[self._at :]
            opened = self._opened(rest)
            closes = self.format.closes
            if opened is None:
                left = rest.lstrip()
                if left.startswith(closes.split("\n")[0]):
                    self.arguments += "}" if self.arguments else "{}"
                    return len(text) - len(left)
                return None
            end = rest.find(after.strip(), opened.end())
            if end < 0:
                return None
            value = rest[opened.end() : end].removeprefix(CDATA)
            if value != rest[opened.end() : end]:
                value = value.removesuffix("]]>")
            if key.endswith("\n"):
                value = value.removeprefix("\n")
            if after.startswith("\n"):
                value = value.removesuffix("\n")
            self._add(opened["key"], self._value(opened["key"], value))
            self._at += end + len(after.strip())

    def _opened(self, text: str) -> re.Match[str] | None:
        before, key, _ = self.format.element
        return re.match(rf"\s*{loose(before)}(?P<key>[^<>\"\n]{{1,128}}?){loose(key)}", text)

    def cut(self, text: str) -> None:
        rest = text[self._at :]
        if (opened := self._opened(rest)) is not None:
            value = json.dumps(rest[opened.end() :].removeprefix("\n"), ensure_ascii=False)
            self._add(opened["key"], value[:-1])

    def _add(self, key: str, value: str) -> None:
        between = ", " if self.arguments else "{"
        self.arguments += f"{between}{json.dumps(key, ensure_ascii=False)}: {value}"

    def _value(self, key: str, text: str) -> str:
        """Return a value as JSON: text where the schema admits text, or where it is nothing else."""
        properties = self.schemas.get(self.name or "", {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        if not (isinstance(schema, Mapping) and admits(schema, "string")) or (
            text.strip() == "null" and admits(schema, "null")
        ):
            for read in (json.loads, ast.literal_eval):  # some templates write values as Python does
                with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                    return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        return json.dumps(text, ensure_ascii=False)


class GemmaParser(Parser):
    """A name, and arguments in Gemma's way: JSON whose keys are bare, with a token of its own for quotes."""

    def __init__(self, format: CallFormat, schemas: Mapping[str, Schema]) -> None:
        super().__init__(format, schemas)
        self._read, self._within = 0, False  # so far, and whether that ends within a text

    def _arguments(self, text: str) -> int | None:
        closes = self.format.closes
        self._read = max(self._read, self._at)
        while True:
            sought = (QUOTE,) if self._within else (QUOTE, closes)
            places = [(at, each) for each in sought if (at := text.find(each, self._read)) >= 0]
            if not places:
                self._read = max(self._read, len(text) - max(map(len, sought)))
                return None
            at, found = min(places)
            if found == closes:
                self.arguments = _gemma_arguments(text[self._at : at])
                return at
            self._read, self._within = at + len(QUOTE), not self._within

    def cut(self, text: str) -> None:
        self.arguments = "{" + text[self._at :]


KEY = re.compile(r'((?:^|[{,])\s*)([^\s"{}\[\],:][^{}\[\],:]*?)(?=\s*:)')


def _gemma_arguments(text: str) -> str:
    """Return arguments as JSON; as they are where they are none, which no grammar lets by."""
    parts = text.split(QUOTE)
    parts[::2] = [KEY.sub(lambda key: key[1] + json.dumps(key[2]), part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads("{" + "".join(parts) + "}", strict=False), ensure_ascii=False)
    return "{" + text + "}"


PARSERS: dict[Payload, type[Parser]] = {
    "object": ObjectParser, "json": JsonParser, "elements": ElementsParser, "gemma": GemmaParser,
}  # fmt: skip


class ObjectScan:
    """Finds the end of a JSON object in a text that grows."""

    def __init__(self, begin: int = 0) -> None:
        # the position after its first member that is an object or a list; None until that is whole
        self.value_end: int | None = None
        self._read, self._depth = begin, 0
        self._in_string = self._escaped = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Return the position after the object; None while it is open."""
        while self._end is None and self._read < len(text):
            character = text[self._read]
            self._read += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self.value_end = self.value_end or self._read
                elif self._depth <= 0:
                    self._end = self._read
        return self._end


def parsed_object(text: str) -> dict[str, object]:
    """Return a JSON object; {} where the text is none, such as one that a limit has cut."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_object(text: str) -> bool:
    return ObjectScan().end(text) == len(text)


def is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def admits(schema: Schema, kind: str) -> bool:
    """Return whether a schema says that a value may be of a type."""
    types = schema.get("type", [])
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    of = str if kind == "string" else type(None)
    return (
        kind in ([types] if isinstance(types, str) else types)
        or any(isinstance(each, of) for each in values)
        or any(isinstance(each, Mapping) and admits(each, kind) for each in parts)
    )
