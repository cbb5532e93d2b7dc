"""Replies: what has come of a request's samples -> events of a stream, or a whole reply.

A whole reply is built of the same parts as a stream: all pieces of a sample come at once then.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from foredraft.llm.output import Output, Piece
from foredraft.serve.blocks import BlockEvent, ContentBlocks
from foredraft.serve.fields import Body
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Error, LengthFields, Problem
from foredraft.serve.scored_text import ScoredText, ShownToken, TokenTexts

logger = logging.getLogger(__name__)

Event: TypeAlias = Mapping[str, Any]  # the data of an event; its "type", if it has one, is the event's name


class Sample:
    """One sample of a request, as far as it has come."""

    _thought: int | None = None  # tokens of its thinking, once that has ended

    def __init__(self, index: int, blocks: ContentBlocks, scored: ScoredText | None = None) -> None:
        self.index, self.blocks, self._scored = index, blocks, scored
        self.tokens = 0  # how many it has
        self.shown: list[ShownToken] = []  # the scored tokens that the last pieces added to the content
        self.told: list[ShownToken] = []  # all of them so far
        self.output: Output | None = None  # once it has ended
        self._characters: list[int] = []  # that each token completes, as long as the thinking may go on

    def take(self, pieces: list[Piece]) -> list[BlockEvent]:
        output = self.output = pieces[-1].output
        ended, cut = output is not None, output is not None and output.finish_reason == "length"
        self.tokens += sum(len(piece.token_ids) for piece in pieces)
        if self._thought is None:
            self._characters += [0] * (self.tokens - len(self._characters))
            for index, text in (part for piece in pieces for part in piece.parts or ()):
                self._characters[index] += len(text)
        if self._scored is None:
            return self.blocks.read("".join(piece.text or "" for piece in pieces), ended=ended, cut=cut)
        steps = self.blocks.read(self._scored.add(pieces), ended=ended, cut=cut)
        self.shown = self._scored.shown(steps, ended=ended)
        self.told += self.shown
        return steps

    def ended(self) -> Output:
        """Return the output of a sample that has ended; raise Problem if it failed."""
        assert self.output is not None
        if self.output.finish_reason == "error":
            raise Problem(500, f"the request failed: {self.output.error}", code="generation_failed")
        return self.output

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
        self.generation, self.job, self.prompt_tokens = generation, generation.job, generation.prompt_tokens
        self.created, job, one = int(time.time()), generation.job, generation.job.one
        self.samples = [
            Sample(
                index, ContentBlocks(job.tools, one.thinking),
                None if one.params.logprobs is None
                else ScoredText(texts, hides=not one.show_special, counts=bool(job.request.echo)),
            )
            for index in range(job.samples)
        ]  # fmt: skip
        self._come: dict[int, list[Piece]] = defaultdict(list)  # of a whole reply, by sample

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
        sent = 0
        try:
            async for event in self._events(heartbeat):
                yield None if event is None else self.numbered(event, sent)
                sent += 1
        except Problem as problem:
            yield self.numbered(self.failure(problem), sent)

    async def _events(self, heartbeat: float | None) -> AsyncIterator[Event | None]:
        for event in self.begin():
            yield event
        async for taken in self.generation.pieces(heartbeat):
            if not taken:
                yield self.heartbeat()
            for index, pieces in taken.items():
                for event in self.part(self.samples[index], pieces):
                    yield event
        for event in self.end():
            yield event
        self.broken()

    async def finish(self) -> None:
        """Wait until all samples have ended, for `whole`."""
        async for taken in self.generation.pieces():
            for index, pieces in taken.items():
                self._come[index] += pieces

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

    def begin(self) -> Iterable[Event]:
        return ()

    @abstractmethod
    def part(self, sample: Sample, pieces: list[Piece]) -> Iterable[Event]:
        """Return the events of further pieces of a sample."""

    def end(self) -> Iterable[Event]:
        """Return the events once all samples have ended."""
        return ()

    def heartbeat(self) -> Event | None:
        """Return the event of a silence; None is a comment."""
        return None

    @abstractmethod
    def whole(self) -> Event:
        """Return the whole reply."""


class BlockReply(Reply):
    """The reply to a request of one sample in a shape that shows blocks."""

    own_headers = True

    def heartbeat(self) -> Event:
        return {"type": "ping"}

    @property
    def sample(self) -> Sample:
        return self.samples[0]

    def begin(self) -> Iterator[Event]:
        for block in self.sample.blocks.all:
            yield from self.step(BlockEvent("open", block))

    def part(self, sample: Sample, pieces: list[Piece]) -> Iterator[Event]:
        for step in sample.take(pieces):
            yield from self.step(step)
        if sample.output is not None:
            sample.ended()
            for step in sample.blocks.close():
                yield from self.step(step)

    def whole(self) -> Event:
        self.sample.take(self._come[0])
        self.sample.ended()
        self.sample.blocks.close()
        return self.state()

    @abstractmethod
    def step(self, step: BlockEvent) -> Iterable[Event]:
        """Return the events of a step of a block."""

    @abstractmethod
    def state(self) -> Event:
        """Return the reply as it is now: begun, or ended."""
