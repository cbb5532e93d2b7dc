"""Blocks: one generation as a row of blocks, text or calls, as two shapes of the API have it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foredraft.llm.output import Output
from foredraft.serve.calls import Call, Event
from foredraft.serve.generations import Generation
from foredraft.serve.problems import check_output
from foredraft.serve.tools import Tools

__all__ = ["Asked", "Block", "Step", "stream_blocks", "whole_blocks"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reply says of its request.

    Attributes:
        id: Of the request.
        model: Name of the model.
        body: As the client sent it.
        prompt_tokens: Tokens of the prompt.
        created: When, in seconds of Unix.
    """

    id: str
    model: str
    body: Mapping[str, Any]
    prompt_tokens: int
    created: float = field(default_factory=time.time)


@dataclass(slots=True)
class Block:
    """A part of a reply.

    Attributes:
        index: Of the block in its reply.
        call: The call; None for text.
        text: So far: the text, or the arguments as JSON.
    """

    index: int
    call: Call | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a stream.

    Attributes:
        kind: What happens.
        block: The block; None at a "ping" and at the "end".
        text: That a "delta" adds.
        output: Of the generation, where it has ended.
    """

    kind: Literal["open", "delta", "close", "ping", "end"]
    block: Block | None = None
    text: str = ""
    output: Output | None = None


class _Blocks:
    """Turns events of a reader into steps."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def steps(self, events: Iterable[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            call = None if event[0] == "content" else event[1]
            if self._open is None or event[0] == "call" or self._open.call is not call:
                steps += [*self.close(), self.open(call)]
            text = event[1] if event[0] == "content" else event[2] if event[0] == "arguments" else ""
            if text:
                assert self._open is not None
                self._open.text += text
                steps.append(Step("delta", self._open, text))
        return steps

    def open(self, call: Call | None) -> Step:
        self._open = Block(len(self.blocks), call)
        self.blocks.append(self._open)
        return Step("open", self._open)

    def close(self, output: Output | None = None) -> list[Step]:
        closed, self._open = self._open, None
        return [] if closed is None else [Step("close", closed, output=output)]


async def stream_blocks(generation: Generation, heartbeat: float | None) -> AsyncIterator[Step]:
    """Yield the steps of a generation of one sample, the last one its end.

    Raises:
        Problem: The request failed while it ran.
    """
    tools = generation.job.tools
    reader, blocks = None if tools is None else tools.reader(), _Blocks()
    if reader is None:
        yield blocks.open(None)
    output: Output | None = None
    async for taken in generation.pieces(heartbeat):
        if not taken:
            yield Step("ping")
            continue
        text, output = "".join(piece.text or "" for _, piece in taken), taken[-1][1].output
        events: list[Event] = [("content", text)] if reader is None and text else []
        if reader is not None:
            events = [*reader.read(text), *(reader.end() if output is not None else [])]
        for step in blocks.steps(events):
            yield step
    assert output is not None
    check_output(output)
    if not blocks.blocks:
        yield blocks.open(None)
    for step in blocks.close(output):
        yield step
    yield Step("end", output=output)


def whole_blocks(output: Output, tools: Tools | None) -> list[Block]:
    """Return the blocks of an output; at least one."""
    text = output.text or ""
    if tools is None:
        return [Block(0, None, text)]
    reader, blocks = tools.reader(), _Blocks()
    blocks.steps([*reader.read(text), *reader.end()])
    return blocks.blocks or [Block(0)]
