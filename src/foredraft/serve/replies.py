"""Replies: the parts that come of a request's samples -> events of a stream, or a whole reply.

Each shape of the API serialises the same parts. A whole reply has one part of each sample, of all its pieces.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import accumulate, count
from typing import Any, ClassVar, NamedTuple, TypeAlias

from foredraft.llm.output import Output, Piece
from foredraft.serve.blocks import BlockEvent, ContentBlocks, ShownToken
from foredraft.serve.fields import Body
from foredraft.serve.generations import Generation
from foredraft.serve.problems import LengthFields, Problem
from foredraft.serve.reply_types import Error
from foredraft.serve.scored_text import ScoredText, TokenTexts

logger = logging.getLogger(__name__)

Event: TypeAlias = Mapping[str, Any]  # the data of an event; its "type", if it has one, is the event's name


class Part(NamedTuple):
    """What further pieces of a sample bring."""

    sample: Sample  # with the part
    first: bool  # it is the sample's first part
    pieces: list[Piece]
    steps: list[BlockEvent]  # what happens to blocks
    shown: list[ShownToken]  # the scored tokens that the content gets

    @property
    def output(self) -> Output | None:
        """The output of a sample that has ended; raises Problem if it failed."""
        output = self.sample.output
        if output is not None and output.finish_reason == "error":
            raise Problem(500, f"the request failed: {output.error}", code="generation_failed")
        return output


class Sample:
    _thought: int | None = None  # tokens of its thinking, once that has ended

    def __init__(self, index: int, blocks: ContentBlocks, scored: ScoredText | None = None) -> None:
        self.index, self.blocks, self._scored = index, blocks, scored
        self.tokens, self._begun = 0, False  # how many it has
        self.output: Output | None = None  # once it has ended
        self._characters: list[int] = []  # that each token completes, as long as the thinking may go on

    def take(self, pieces: list[Piece]) -> Part:
        output = self.output = pieces[-1].output
        ended, cut = output is not None, output is not None and output.finish_reason == "length"
        self.tokens += sum(len(piece.token_ids) for piece in pieces)
        if self._thought is None:
            self._characters += [0] * (self.tokens - len(self._characters))
            for index, text in (part for piece in pieces for part in piece.parts or ()):
                self._characters[index] += len(text)
        scored, shown = self._scored, list[ShownToken]()
        text = "".join(piece.text or "" for piece in pieces) if scored is None else scored.add(pieces)
        steps = self.blocks.read(text, ended=ended, cut=cut)
        if scored is not None:
            shown = scored.shown(steps, ended=ended)
            for token in shown:
                self.blocks.all[token.block].tokens.append(token)
        first, self._begun = not self._begun, True
        return Part(self, first, pieces, steps, shown)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens its thinking has, with its markers; a token that completes the last one counts."""
        thought = self.blocks.thought
        if thought == sys.maxsize:
            return self.tokens
        if self._thought is None and thought:
            ends = accumulate(self._characters)
            self._thought = next((n for n, end in enumerate(ends, start=1) if end >= thought), self.tokens)
        return self._thought or 0


class Reply(ABC):
    """The reply to one request, in one shape of the API."""

    request: ClassVar[type[Body]]  # the type of the request's body
    types: ClassVar[tuple[Any, Any]]  # the types of a whole reply and of an event
    errors: ClassVar[tuple[Any, ...]] = (Error,)  # the types of a refusal's body
    route: ClassVar[str]  # the name of its route
    operation: ClassVar[str] = "chat"  # what traces call it
    lengths: ClassVar[LengthFields]  # the fields that decide how long a request is
    # what ends a stream of events; a stream that it ends may come as plain text, too
    done: ClassVar[bytes] = b""
    own_headers: ClassVar[bool] = False  # a key may come in `x-api-key`; the reply has its id in `request-id`

    def __init__(
        self, id: str, model: str, body: Mapping[str, Any], generation: Generation, texts: TokenTexts
    ) -> None:
        self.id, self.model, self.texts = id, model, texts
        self.generation, self.created = generation, int(time.time())
        self.job = job = generation.job
        self.prompt_tokens, one = sum(each.prompt_tokens for each in generation.handles), job.one
        self.samples = [
            Sample(
                index, ContentBlocks(job.tools, one.thinking),
                None if one.params.logprobs is None
                else ScoredText(texts, hides=not one.show_special, counts=bool(job.request.echo)),
            )
            for index in range(job.samples)
        ]  # fmt: skip

    @staticmethod
    @abstractmethod
    def failure(problem: Problem) -> Event:
        """Return the event that ends a stream with a problem."""

    @staticmethod
    def numbered(event: Event, number: int) -> Event:
        """Return an event of a stream, with its number where the shape has numbers."""
        return event

    async def events(self, heartbeat: float | None) -> AsyncIterator[Event | None]:
        """Yield the events of a stream, the last one an error if the request failed; None is a comment."""
        numbers = count()
        try:
            async for event in self._events(heartbeat):
                yield None if event is None else self.numbered(event, next(numbers))
        except Problem as problem:
            yield self.numbered(self.failure(problem), next(numbers))

    async def _events(self, heartbeat: float | None) -> AsyncIterator[Event | None]:
        begun = not self.begins_late
        for event in self.begin() if begun else ():
            yield event
        async for taken in self.generation.pieces(heartbeat):
            if not taken:
                yield self.silence if begun else None
            elif not begun:
                begun = True
                for event in self.begin():
                    yield event
            for index, pieces in taken.items():
                for event in self.part(self.samples[index].take(pieces)):
                    yield event
        for event in self.end():
            yield event
        self.broken()

    async def finish(self) -> Event:
        come: dict[int, list[Piece]] = defaultdict(list)
        async for taken in self.generation.pieces():
            for index, pieces in taken.items():
                come[index] += pieces
        return self.whole([sample.take(come[sample.index]) for sample in self.samples])

    def broken(self) -> list[str]:
        """Return what the calls break of their schemas, of what no grammar holds; the log has it, too."""
        tools = self.job.tools
        if tools is None or not tools.unenforced:
            return []
        calls = [call for sample in self.samples for call in sample.blocks.calls]
        found = list(dict.fromkeys(place for call in calls for place in tools.broken(call)))
        if found:
            logger.warning("a call does not fit its schema: %s", ", ".join(found))
        return found

    silence: ClassVar[Event | None] = None  # the event of a time without any; None is a comment
    begins_late: ClassVar[bool] = False  # a stream begins with the first piece, which its first event needs

    def begin(self) -> Iterable[Event]:
        return ()

    @abstractmethod
    def part(self, part: Part) -> Iterable[Event]:
        """Return the events of a further part of a sample."""

    def end(self) -> Iterable[Event]:
        """Return the events once all samples have ended."""
        return ()

    @abstractmethod
    def whole(self, parts: list[Part]) -> Event:
        """Return the whole reply that has one part of each sample."""


class BlockReply(Reply):
    """The reply to a request of one sample in a shape that shows blocks."""

    own_headers = True
    silence: ClassVar[Event] = {"type": "ping"}

    @property
    def sample(self) -> Sample:
        return self.samples[0]

    def begin(self) -> Iterator[Event]:
        for block in self.sample.blocks.all:
            yield from self.step(BlockEvent("open", block))

    def part(self, part: Part) -> Iterator[Event]:
        for step in part.steps:
            yield from self.step(step)
        if part.output is not None:
            for step in part.sample.blocks.close():
                yield from self.step(step)

    def whole(self, parts: list[Part]) -> Event:
        output = parts[0].output  # raises Problem where it failed
        assert output is not None, "a whole reply is over"
        self.sample.blocks.close()
        return self.state()

    @abstractmethod
    def step(self, step: BlockEvent) -> Iterable[Event]:
        """Return the events of a step of a block."""

    @abstractmethod
    def state(self) -> Event:
        """Return the reply as it is now: begun, or ended."""
