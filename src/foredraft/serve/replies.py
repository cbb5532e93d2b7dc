"""Replies: what has come of a request's samples -> events of a stream, or a whole reply.

A whole reply is built of the same parts as a stream: each sample comes in one piece then.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from foredraft.llm.output import Output, Piece
from foredraft.serve.blocks import BlockEvent, ContentBlocks
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Error, LengthFields, Problem, check_output
from foredraft.serve.requests import Body, ChatRequest, CompletionRequest
from foredraft.serve.scored_text import ScoredText, ShownToken
from foredraft.serve.token_texts import TokenTexts

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
        self.output = pieces[-1].output
        self.tokens += sum(len(piece.token_ids) for piece in pieces)
        self._note(pieces)
        ended = self.output is not None
        cut = self.output is not None and self.output.finish_reason == "length"
        if self._scored is None:
            return self.blocks.read("".join(piece.text or "" for piece in pieces), ended=ended, cut=cut)
        steps = self.blocks.read(self._scored.add(pieces), ended=ended, cut=cut)
        self.shown = self._scored.shown(steps, ended=ended)
        self.told += self.shown
        return steps

    def _note(self, pieces: list[Piece]) -> None:
        if self._thought is None:
            self._characters += [0] * (self.tokens - len(self._characters))
            for index, text in (part for piece in pieces for part in piece.parts or ()):
                self._characters[index] += len(text)

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
        self.id, self.model, self.body, self.texts = id, model, body, texts
        self.generation, self.job, self.prompt_tokens = generation, generation.job, generation.prompt_tokens
        self.created = int(time.time())
        self.samples = [
            Sample(index, ContentBlocks(self.job.tools, self.job.thinking), self._scored_text())
            for index in range(self.job.samples)
        ]

    def _scored_text(self) -> ScoredText | None:
        if self.job.params.logprobs is None:
            return None
        return ScoredText(self.texts, hides=not self.job.show_special, counts=self.job.echo)

    @classmethod
    @abstractmethod
    def read(cls, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
        """Return the request of a body."""

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
            by_sample: dict[int, list[Piece]] = {}
            for index, piece in taken:
                by_sample.setdefault(index, []).append(piece)
            for index, pieces in by_sample.items():
                for event in self.part(self.samples[index], pieces):
                    yield event
        for event in self.end():
            yield event
        self.broken()

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

    async def finish(self) -> None:
        """Wait until all samples have ended, for `whole`."""
        async for taken in self.generation.pieces():
            for index, piece in taken:
                self.samples[index].output = self.samples[index].output or piece.output

    @abstractmethod
    def whole(self) -> Event:
        """Return the whole reply."""

    def in_one_piece(self, sample: Sample) -> tuple[Output, list[Piece]]:
        """Take a sample that has ended as one piece; return its output and the piece."""
        output = sample.output
        assert output is not None
        check_output(output)
        pieces = [
            Piece(
                output.text, output.token_ids, output.origins,
                parts=None if output.pieces is None else list(enumerate(output.pieces)),
                logprobs=output.logprobs, prompt_logprobs=output.prompt_logprobs, trace=output.trace,
                output=output,
            )
        ]  # fmt: skip
        sample.take(pieces)
        return output, pieces


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
            check_output(sample.output)
            for step in sample.blocks.close():
                yield from self.step(step)

    def whole(self) -> Event:
        self.in_one_piece(self.sample)
        self.sample.blocks.close()
        return self.state()

    @abstractmethod
    def step(self, step: BlockEvent) -> Iterable[Event]:
        """Return the events of a step of a block."""

    @abstractmethod
    def state(self) -> Event:
        """Return the reply as it is now: begun, or ended."""
