"""Blocks: the text of one sample as a row of blocks, each thinking, a text or a call, while it grows; the
reader of calls.

However the text is cut into pieces, it has the same blocks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from foredraft.decode.scores import Score
from foredraft.decode.thinking import ThinkingMarkers, ThinkingReader, overlap

if TYPE_CHECKING:
    from foredraft.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The way in which a model writes calls."""

    opens: str  # before each call
    closes: str  # after each call
    between: str  # from one call to the next
    arguments: str  # the key of the arguments, beside "name"
    # `opens` shows that a call follows, wherever it stands; otherwise calls begin the text
    marked: bool = False
    first: str = ""
    last: str = ""


# Nous Research's Hermes; Qwen 2.5 and 3.
HERMES = CallFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments", marked=True)
LLAMA = CallFormat("", "", "; ", "parameters")  # Llama 3.1 and later
MISTRAL = CallFormat("", "", ", ", "arguments", first="[", last="]")  # after the token [TOOL_CALLS]

MARKER = HERMES.opens.strip()
CLOSING = HERMES.closes.strip()
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
BEGINNING = '{"name":"'  # of every call, white space aside
BETWEEN = " \t\r\n,;"  # characters from one call to the next
ID_LENGTH = 9  # letters and digits, as Mistral's template asks


@dataclass(slots=True)
class ParsedToolCall:
    index: int  # among the calls of its text
    name: str  # of the tool
    arguments: str = ""  # JSON as the model wrote it, so far
    id: str = field(default_factory=lambda: secrets.token_hex(ID_LENGTH)[:ID_LENGTH])  # a fresh one


# A call and what its arguments get, "" where it has just begun; None and further content.
Event: TypeAlias = tuple[ParsedToolCall | None, str]


class CallReader:
    def __init__(self, format: CallFormat, names: Collection[str], most: int | None = None) -> None:
        self._format, self._names, self._most = format, frozenset(names), most
        self._heads = [
            f'{{"name":{json.dumps(name)},"{key}":{{' for name in names for key in ("arguments", "parameters")
        ]
        self.calls: list[ParsedToolCall] = []  # found so far
        self._text = ""  # not yet decided
        self._state: Literal["content", "object", "after"] = "content" if format.marked else "after"
        self._scan = _ObjectScan()
        self._call: ParsedToolCall | None = None  # whose arguments are being read
        self._sent = 0  # characters of the object that are sent as arguments
        self._before = ""  # what stood before the object that is being read
        self._follows_call = False  # no content has come since the last call
        self._cut = False  # a limit has ended the text

    def read(self, piece: str) -> list[Event]:
        self._text += piece
        return self._settle(ended=False)

    def end(self, *, cut: bool = False) -> list[Event]:
        self._cut = cut
        return self._settle(ended=True)

    def _settle(self, *, ended: bool) -> list[Event]:
        events, going = list[Event](), True
        reads = {"content": self._content, "object": self._object, "after": self._after}
        while going and (self._text or ended):
            going = reads[self._state](events, ended)
        return events

    def _show(self, events: list[Event], length: int) -> None:
        shown, self._text = self._text[:length], self._text[length:]
        if shown:
            self._follows_call = False
            events.append((None, shown))

    def _content(self, events: list[Event], ended: bool) -> bool:
        if self._follows_call:  # white space around calls is no content
            self._text = self._text.lstrip()
        if not self._format.marked:
            self._show(events, len(self._text))
            return False
        before, marker, _ = self._text.partition(MARKER)
        begun = 0 if marker or (ended and not self._cut) else overlap(before, MARKER)
        before = before[: len(before) - begun]
        self._show(events, len(before if ended and not marker and not begun else before.rstrip()))
        if ended and begun:
            self._text = ""
        if marker:
            at = self._text.index(MARKER) + len(MARKER)
            before, self._text = self._text[:at], self._text[at:]
            self._begin_object(before)
        return bool(marker)

    def _after(self, events: list[Event], ended: bool) -> bool:
        """Read what stands before a call where nothing marks it, or between two calls."""
        rest = self._text.lstrip() if self._format.marked else self._text.lstrip(BETWEEN)
        if self._format.marked:
            if CLOSING.startswith(rest):
                if ended:
                    self._text = ""
                return False
            self._text, self._state = rest.removeprefix(CLOSING), "content"
            return True
        if self.calls:
            rest = rest.removeprefix(self._format.last)
        else:
            rest = rest.removeprefix(self._format.first).lstrip()
        if not rest and not ended:
            return False
        if not rest and self._cut and self._text.strip():  # what stands before a call, and no call
            self._text = ""
            return False
        if rest.startswith("{"):
            before, self._text = self._text.removesuffix(rest), rest
            self._begin_object(before)
            return True
        if self.calls:
            self._text = rest
        self._state = "content"
        return True

    def _begin_object(self, before: str) -> None:
        """Begin to read an object; `before` is content if it turns out to be no call."""
        self._before = before
        self._state, self._scan, self._call, self._sent = "object", _ObjectScan(), None, 0

    def _object(self, events: list[Event], ended: bool) -> bool:
        end, begun = self._scan.end(self._text), "".join(self._text[: 4 * len(BEGINNING)].split())
        may_be_call = self._format.marked or begun.startswith(BEGINNING) or BEGINNING.startswith(begun)
        if self._call is None:
            self._call = self._named(events, end)
        if self._call is not None:
            # Further members, such as an id, may follow the arguments.
            stop = self._scan.value_end or (len(self._text) if end is None else end)
            if arguments := self._text[self._sent : stop]:
                self._call.arguments += arguments
                self._sent = stop
                events.append((self._call, arguments))
        elif end is None and not ended and may_be_call:
            return False
        if end is None and self._call is not None:
            return False
        if end is None and self._cut:  # a beginning of a call is no content
            given = "".join(self._text.split())
            opens = given[:1] in ("", "{") or not self._format.marked
            if opens and (self._format.marked or any(head.startswith(given) for head in self._heads)):
                self._text = ""
                return False
        if self._call is None:  # no call after all
            self._text = self._before + self._text
            self._state = "content"
            self._show(events, len(self._text))
            return False
        self._text, self._state, self._follows_call = self._text[end:], "after", True
        return True

    def _named(self, events: list[Event], end: int | None) -> ParsedToolCall | None:
        """Return the call once its name is known, with all arguments where they came before the name."""
        head = HEAD.match(self._text)
        if head is not None:
            name, self._sent, arguments = json.loads(head[1], strict=False), head.end(), ""
        elif end is not None:
            found = parsed_object(self._text[:end])
            given = found.get("arguments", found.get("parameters", {}))
            # some models write them as a string that holds JSON
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            name, self._sent = found.get("name"), end
        else:
            return None
        if not isinstance(name, str) or name not in self._names or len(self.calls) == self._most:
            return None
        call = ParsedToolCall(len(self.calls), name)
        self.calls.append(call)
        events.append((call, ""))
        if arguments:
            call.arguments = arguments
            events.append((call, arguments))
        return call


class _ObjectScan:
    """Finds the end of a JSON object in a text that grows."""

    def __init__(self) -> None:
        # the position after its first member that is an object or a list; None until that is whole
        self.value_end: int | None = None
        self._read, self._depth = 0, 0
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
    return _ObjectScan().end(text) == len(text)


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token as the text of a reply has it."""

    score: Score  # of the whole token
    text: str  # the text that it completes, as far as the reply has it; "" where it only begins a character
    data: bytes  # its bytes, as far as the reply has them
    block: int = 0  # the index of the block that it is in


@dataclass(slots=True)
class ContentBlock:
    index: int  # of the block in its reply
    call: ParsedToolCall | None = None  # the call; None for text
    text: str = ""  # so far: the text, or the arguments as JSON
    thinking: bool = False  # the text is reasoning
    tokens: list[ShownToken] = field(default_factory=list)  # of its content, where they are scored

    @property
    def is_content(self) -> bool:
        return self.call is None and not self.thinking


class BlockEvent(NamedTuple):
    """What happens to a block; `text` is what a "delta" adds."""

    kind: Literal["open", "delta", "close"]
    block: ContentBlock
    text: str = ""


class ContentBlocks:
    """The blocks of one text. Without tools and thinking it is one block, open from the beginning."""

    def __init__(self, tools: Tools | None, thinking: ThinkingMarkers | None = None) -> None:
        self._calls = None if tools is None else tools.reader()
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        self.all: list[ContentBlock] = []  # the blocks so far; the last one may be open
        if self._calls is None and self._thinking is None:
            self.all.append(ContentBlock(0))

    def read(self, text: str, *, ended: bool, cut: bool = False) -> list[BlockEvent]:
        parts = [("content", text)] if text else []
        if self._thinking is not None:
            parts = [*self._thinking.read(text), *(self._thinking.end(cut=cut) if ended else ())]
        steps: list[BlockEvent] = []
        for kind, shown in parts:
            if kind == "thinking" or self._calls is None:
                steps += self._add(None, shown, thinking=kind == "thinking")
            else:
                steps += [step for event in self._calls.read(shown) for step in self._add(*event)]
        if ended and self._calls is not None:
            steps += [step for event in self._calls.end(cut=cut) for step in self._add(*event)]
        return steps

    def _add(self, call: ParsedToolCall | None, text: str, *, thinking: bool = False) -> list[BlockEvent]:
        """Return the steps that add a text to a call, to the thinking or to the content."""
        last, steps = self.all[-1] if self.all else None, list[BlockEvent]()
        if last is None or last.call is not call or last.thinking != thinking:
            steps = [BlockEvent("close", last)] if last is not None else []
            steps.append(self._open(call, thinking))
        if text:
            self.all[-1].text += text
            steps.append(BlockEvent("delta", self.all[-1], text))
        return steps

    def close(self) -> list[BlockEvent]:
        """Return the steps that end the text; a text without blocks gets an empty one."""
        opened = [] if self.all else [self._open(None)]
        return [*opened, BlockEvent("close", self.all[-1])]

    @property
    def thought(self) -> int:
        """Characters of the text that belong to the thinking, as in `ThinkingReader`."""
        return 0 if self._thinking is None else self._thinking.thought

    @property
    def content(self) -> str:
        return "".join(block.text for block in self.all if block.is_content)

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.all if block.thinking)

    @property
    def calls(self) -> list[ParsedToolCall]:
        return [block.call for block in self.all if block.call is not None]

    def _open(self, call: ParsedToolCall | None, thinking: bool = False) -> BlockEvent:
        self.all.append(ContentBlock(len(self.all), call, thinking=thinking))
        return BlockEvent("open", self.all[-1])
