"""Blocks: the text of one sample as a row of blocks, each a text or a call, while it grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from foredraft.serve.tool_calls import Event, ToolCall
from foredraft.serve.tools import Tools

__all__ = ["Block", "Blocks", "Step"]


@dataclass(slots=True)
class Block:
    """A part of a reply.

    Attributes:
        index: Of the block in its reply.
        call: The call; None for text.
        text: So far: the text, or the arguments as JSON.
    """

    index: int
    call: ToolCall | None = None
    text: str = ""


class Step(NamedTuple):
    """What happens to a block; `text` is what a "delta" adds."""

    kind: Literal["open", "delta", "close"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one text. Without tools it is one block, which is open from the beginning.

    Args:
        tools: What the text may call.

    Attributes:
        all: The blocks so far; the last one may be open.
    """

    def __init__(self, tools: Tools | None) -> None:
        self._reader = None if tools is None else tools.reader()
        self.all: list[Block] = [Block(0)] if self._reader is None else []

    def read(self, text: str, *, ended: bool, cut: bool = False) -> list[Step]:
        """Return the steps of a further part of the text.

        Args:
            text: The part.
            ended: Nothing follows it.
            cut: A limit ended it.
        """
        if self._reader is None:
            events: list[Event] = [("content", text)] if text else []
        else:
            events = [*self._reader.read(text), *(self._reader.end(cut=cut) if ended else ())]
        steps: list[Step] = []
        for event in events:
            call = None if event[0] == "content" else event[1]
            if not self.all or event[0] == "call" or self.all[-1].call is not call:
                steps += [Step("close", block) for block in self.all[-1:]]
                steps.append(self._open(call))
            if event[0] != "call":
                block, added = self.all[-1], event[-1]
                block.text += added
                steps.append(Step("delta", block, added))
        return steps

    def close(self) -> list[Step]:
        """Return the steps that end the text; a text without blocks gets an empty one."""
        opened = [] if self.all else [self._open(None)]
        return [*opened, Step("close", self.all[-1])]

    @property
    def content(self) -> str:
        """The text beside the calls."""
        return "".join(block.text for block in self.all if block.call is None)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, with what is known of their arguments."""
        return [block.call for block in self.all if block.call is not None]

    def _open(self, call: ToolCall | None) -> Step:
        self.all.append(Block(len(self.all), call))
        return Step("open", self.all[-1])
