"""Blocks: the text of one sample as a row of blocks, each thinking, a text or a call, while it grows.

However the text is cut into pieces, it has the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from foredraft.decode.scores import Score
from foredraft.decode.thinking import ThinkingMarkers, ThinkingReader
from foredraft.serve.calls import ParsedToolCall

if TYPE_CHECKING:
    from foredraft.serve.tools import Tools


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
