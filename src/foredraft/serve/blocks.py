"""Blocks: the text of one sample as a row of blocks, each thinking, a text or a call, while it grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from foredraft.decode.thinking import Part, Thinking, ThinkingReader
from foredraft.serve.tool_calls import Event, ToolCall
from foredraft.serve.tools import Tools

__all__ = ["Block", "Blocks", "Step"]

Shown: TypeAlias = Event | Part


@dataclass(slots=True)
class Block:
    """A part of a reply.

    Attributes:
        index: Of the block in its reply.
        call: The call; None for text.
        text: So far: the text, or the arguments as JSON.
        thinking: The text is reasoning.
    """

    index: int
    call: ToolCall | None = None
    text: str = ""
    thinking: bool = False

    @property
    def is_content(self) -> bool:
        """Whether it is a text that answers."""
        return self.call is None and not self.thinking


class Step(NamedTuple):
    """What happens to a block; `text` is what a "delta" adds."""

    kind: Literal["open", "delta", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one text. Without tools and thinking it is one block, which is open from the beginning.

    Args:
        tools: What the text may call.
        thinking: How it marks its thinking.

    Attributes:
        all: The blocks so far; the last one may be open.
    """

    def __init__(self, tools: Tools | None, thinking: Thinking | None = None) -> None:
        self._reader = None if tools is None else tools.reader()
        self._thinking = None if thinking is None else ThinkingReader(thinking)
        one = self._reader is None and self._thinking is None
        self.all: list[Block] = [Block(0)] if one else []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> list[Step]:
        """Return the steps of a further part of the text.

        Args:
            text: The part.
            ended: Nothing follows it.
            cut: A limit ended it.
        """
        events: list[Shown] = []
        for part in self._parts(text, ended=ended, cut=cut):
            if part[0] == "content" and self._reader is not None:
                events += self._reader.read(part[1])
            else:
                events.append(part)
        if ended and self._reader is not None:
            events += self._reader.end(cut=cut)
        steps: list[Step] = []
        for event in events:
            thinking = event[0] == "thinking"
            call = None if event[0] == "content" or event[0] == "thinking" else event[1]
            if not self.all or event[0] == "call" or not self._goes_on(call, thinking):
                steps += [Step("close", block) for block in self.all[-1:]]
                steps.append(self._open(call, thinking))
            if event[0] != "call":
                block, added = self.all[-1], event[-1]
                block.text += added
                steps.append(Step("delta", block, added))
        return steps

    def close(self) -> list[Step]:
        """Return the steps that end the text; a text without blocks gets an empty one."""
        opened = [] if self.all else [self._open(None)]
        return [*opened, Step("close", self.all[-1])]

    def _parts(self, text: str, *, ended: bool, cut: bool) -> list[Part]:
        """Return what a further part of the text adds to the thinking and to the content."""
        if self._thinking is None:
            return [("content", text)] if text else []
        return [*self._thinking.read(text), *(self._thinking.end(cut=cut) if ended else ())]

    def _goes_on(self, call: ToolCall | None, thinking: bool) -> bool:
        """Return whether the last block is the one of a call, of thinking, or of a text."""
        last = self.all[-1]
        return last.call is call and last.thinking == thinking

    @property
    def thought(self) -> int:
        """Characters of the text that belong to the thinking, as in `ThinkingReader`."""
        return 0 if self._thinking is None else self._thinking.thought

    @property
    def content(self) -> str:
        """The text beside the thinking and the calls."""
        return "".join(block.text for block in self.all if block.is_content)

    @property
    def reasoning(self) -> str:
        """The thinking."""
        return "".join(block.text for block in self.all if block.thinking)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, with what is known of their arguments."""
        return [block.call for block in self.all if block.call is not None]

    def _open(self, call: ToolCall | None, thinking: bool = False) -> Step:
        self.all.append(Block(len(self.all), call, thinking=thinking))
        return Step("open", self.all[-1])
