"""Replies of the server to a text that no model wrote, streamed in pieces and whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.llm.output import Output, Piece
from foredraft.llm.requests import Submission
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.replies import Event, Reply, Sample
from foredraft.serve.requests import ChatRequest, Job
from foredraft.serve.scored_text import TokenTexts
from foredraft.serve.tools import Tool, Tools
from tests.support.checkpoints import tiny_tokenizer

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "%s"}}\n</tool_call>'


def read_tool() -> Tools | None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "read"}})
    return Tools.of([tool], None, None, Tokenizer(tiny_tokenizer(), ChatTemplate({"default": ""})))


class Written:
    def __init__(self, text: str, size: int, reason: str = "eos", *, calls: bool = True) -> None:
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        output = Output(
            text=text, token_ids=[1] * len(parts), origins=["target"] * len(parts), finish_reason=reason, seed=0,
            sample=0, prompt_tokens=1, stats=Stats(), pieces=parts,
        )  # fmt: skip

        async def pieces(heartbeat: float | None = None) -> AsyncIterator[dict[int, list[Piece]]]:
            for index, part in enumerate(parts):
                yield {0: [Piece(part, [1], ["target"], parts=[(index, part)])]}
            yield {}
            yield {0: [Piece("", [], [], parts=[], output=output)]}

        tools = read_tool() if calls else None
        thinking = ThinkingMarkers("<think>", "</think>")
        request = ChatRequest.read({"messages": []})
        job = Job(request, [[5]], Submission([5], SamplingParams(), thinking=thinking), tools)
        self._generation: Any = SimpleNamespace(
            job=job, handles=[SimpleNamespace(prompt_tokens=1, cached_tokens=0)], pieces=pieces
        )

    def streamed(self, shape: type[Reply]) -> tuple[list[Event], Sample]:
        reply = shape("id", "demo", {}, self._generation, TokenTexts(None, 0))

        async def collect() -> list[Event]:
            return [event async for event in reply.events(None) if event is not None]

        return asyncio.run(collect()), reply.samples[0]

    def whole(self, shape: type[Reply]) -> tuple[Event, Sample]:
        reply = shape("id", "demo", {}, self._generation, TokenTexts(None, 0))
        return asyncio.run(reply.finish()), reply.samples[0]
