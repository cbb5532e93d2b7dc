"""Replies with text and several calls, as the shapes of the API with blocks stream them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.stats import Stats
from foredraft.llm.output import Output, Piece
from foredraft.model.chat import ChatTemplate
from foredraft.serve import messages, responses
from foredraft.serve.blocks import Asked
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

    async def pieces(heartbeat: float | None) -> AsyncIterator[list[tuple[int, Piece]]]:
        for at in range(0, len(text), size):
            yield [(0, Piece(text[at : at + size], [1], ["target"]))]
        yield []
        yield [(0, Piece("", [], [], output=made_output(text)))]

    return SimpleNamespace(job=SimpleNamespace(tools=tools), prompt_tokens=1, pieces=pieces)


def events(dialect: Any, text: str, size: int) -> list[tuple[str, dict[str, Any]]]:
    async def collect() -> list[tuple[str, dict[str, Any]]]:
        return [
            event async for event in dialect.events(Asked("id", "demo", {}, 1), generation(text, size), None)
        ]

    return asyncio.run(collect())


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_blocks_of_a_message_follow_each_other(size: int) -> None:
    open_, blocks = None, []
    for name, fields in events(messages, TEXT, size):
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
    made = events(responses, TEXT, size)
    for name, fields in made:
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
    name, last = made[-1]
    assert name == "response.completed" and last["response"]["output"] == done
    assert [item["arguments"] for item in done[1:3]] == ['{"path": "a"}', '{"path": "b"}']


@pytest.mark.parametrize("dialect", [messages, responses])
def test_an_empty_reply_has_one_empty_block(dialect: Any) -> None:
    names = [name for name, _ in events(dialect, "", 1)]
    assert sum(name in ("content_block_start", "response.output_item.added") for name in names) == 1
    assert "ping" in names
