"""Replies with text and several calls, as the shapes of the API with blocks stream them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.llm.output import Output, Piece
from foredraft.model.chat import ChatTemplate
from foredraft.serve.completions import ChatReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Event, Reply
from foredraft.serve.requests import Job
from foredraft.serve.responses import ResponseReply
from foredraft.serve.token_texts import TokenTexts
from foredraft.serve.tools import Tool, Tools

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "%s"}}\n</tool_call>'
TEXT = "Two files.\n" + CALL % "a" + "\n" + CALL % "b" + "\nDone."


def made_output(text: str) -> Output:
    return Output(
        text=text,
        token_ids=[1],
        origins=["target"],
        finish_reason="eos",
        seed=0,
        sample=0,
        prompt_tokens=1,
        stats=Stats(),
    )


def generation(text: str, size: int) -> Any:
    """A generation whose text comes in pieces of `size` characters."""
    tools = Tools.of(
        [Tool.model_validate({"type": "function", "function": {"name": "read"}})],
        None,
        None,
        ChatTemplate({"default": ""}),
    )

    async def pieces(heartbeat: float | None = None) -> AsyncIterator[list[tuple[int, Piece]]]:
        for at in range(0, len(text), size):
            yield [(0, Piece(text[at : at + size], [1], ["target"]))]
        yield []
        yield [(0, Piece("", [], [], output=made_output(text)))]

    job = Job([[5]], SamplingParams(), n=1, tools=tools)
    return SimpleNamespace(job=job, prompt_tokens=1, pieces=pieces)


def events(shape: type[Reply], text: str, size: int) -> list[Event]:
    reply = shape("id", "demo", {}, generation(text, size), TokenTexts(None, 0))

    async def collect() -> list[Event]:
        return [event async for event in reply.events(None) if event is not None]

    return asyncio.run(collect())


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_blocks_of_a_message_follow_each_other(size: int) -> None:
    open_, blocks = None, []
    for fields in events(MessageReply, TEXT, size):
        name = fields["type"]
        if name == "content_block_start":
            assert open_ is None and fields["index"] == len(blocks)
            open_ = fields["index"]
            blocks.append([fields["content_block"], ""])
        elif name == "content_block_delta":
            assert fields["index"] == open_
            blocks[-1][1] += fields["delta"].get("text", fields["delta"].get("partial_json"))
        elif name == "content_block_stop":
            assert fields["index"] == open_
            open_ = None
    assert open_ is None
    assert [(block["type"], text) for block, text in blocks] == [
        ("text", "Two files."), ("tool_use", '{"path": "a"}'), ("tool_use", '{"path": "b"}'), ("text", "Done."),
    ]  # fmt: skip
    assert len({block["id"] for block, _ in blocks if block["type"] == "tool_use"}) == 2


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_items_of_a_response_follow_each_other(size: int) -> None:
    open_, done = None, []
    made = events(ResponseReply, TEXT, size)
    for fields in made:
        name = fields["type"]
        if name == "response.output_item.added":
            assert open_ is None
            open_ = fields["output_index"]
        elif name == "response.output_item.done":
            assert fields["output_index"] == open_ == len(done)
            open_ = None
            done.append(fields["item"])
        elif name.startswith("response.") and "output_index" in fields:
            assert fields["output_index"] == open_
    assert [item["type"] for item in done] == ["message", "function_call", "function_call", "message"]
    last = made[-1]
    assert last["type"] == "response.completed" and last["response"]["output"] == done
    assert [item["arguments"] for item in done[1:3]] == ['{"path": "a"}', '{"path": "b"}']


@pytest.mark.parametrize("shape", [MessageReply, ResponseReply])
def test_an_empty_reply_has_one_empty_block(shape: type[Reply]) -> None:
    names = [event["type"] for event in events(shape, "", 1)]
    assert sum(name in ("content_block_start", "response.output_item.added") for name in names) == 1
    assert "ping" in names


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_chat_has_the_same_text_and_calls_in_chunks(size: int) -> None:
    *chunks, last = [event["choices"][0] for event in events(ChatReply, TEXT, size)]
    deltas = [chunk["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Two files.Done."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    begun = [part for part in parts if "id" in part]
    assert [(part["index"], part["function"]["name"]) for part in begun] == [(0, "read"), (1, "read")]
    for index, path in enumerate("ab"):
        arguments = "".join(part["function"]["arguments"] for part in parts if part["index"] == index)
        assert arguments == f'{{"path": "{path}"}}'
    assert last["delta"] == {} and last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("shape", [ChatReply, MessageReply, ResponseReply])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_whole_reply_has_the_text_and_the_calls_of_its_stream(shape: type[Reply], size: int) -> None:
    reply = shape("id", "demo", {}, generation(TEXT, size), TokenTexts(None, 0))
    asyncio.run(reply.finish())
    whole = reply.whole()
    if shape is ChatReply:
        message = whole["choices"][0]["message"]
        assert message["content"] == "Two files.Done."
        said = [call["function"]["arguments"] for call in message["tool_calls"]]
    elif shape is MessageReply:
        assert [block["text"] for block in whole["content"] if block["type"] == "text"] == [
            "Two files.",
            "Done.",
        ]
        said = [json.dumps(block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    else:
        streamed = events(shape, TEXT, size)[-1]["response"]
        assert [item["type"] for item in whole["output"]] == [item["type"] for item in streamed["output"]]
        said = [item["arguments"] for item in whole["output"] if item["type"] == "function_call"]
    assert said == ['{"path": "a"}', '{"path": "b"}']
