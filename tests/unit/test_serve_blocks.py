"""Replies with reasoning, text and several calls: each shape of the API, streamed and whole, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.serve.completions import ChatReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Event, Reply, Sample
from foredraft.serve.responses import ResponseReply
from tests.support.mutation import assert_caught, defect
from tests.support.replies import CALL, Written

THOUGHT = "I see.\n\nIt <is> so."
ANSWER = f"Two files.\n{CALL % 'a'}\n{CALL % 'b'}\nDone."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CLOSED = TEXT.index("</think>") + len("</think>")
CALLS = ['{"path": "a"}', '{"path": "b"}']
SIZES = pytest.mark.parametrize("size", [1, 3, 7, 1000])


def chat_of(events: list[Event]) -> dict[str, Any]:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    names = ("content", "reasoning_content", "reasoning")
    found: dict[str, Any] = {name: "".join(delta.get(name, "") for delta in deltas) for name in names}
    calls: list[str] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            assert (part["index"], part["function"]["name"]) == (len(calls), "read")
            calls.append("")
        calls[part["index"]] += part["function"]["arguments"]
    return {**found, "calls": calls}


def blocks_of(events: list[Event]) -> list[tuple[str, str, str | None]]:
    """Return type, text and signature of a message's blocks, which follow each other."""
    open_, blocks = None, list[list[Any]]()
    for event in events:
        if event["type"] == "content_block_start":
            assert open_ is None and event["index"] == len(blocks)
            open_ = event["index"]
            blocks.append([event["content_block"]["type"], "", None])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_
            delta = event["delta"]
            blocks[-1][1] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
            blocks[-1][2] = delta.get("signature", blocks[-1][2])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_
            open_ = None
    assert open_ is None
    return [(kind, text, signature) for kind, text, signature in blocks]


def items_of(events: list[Event]) -> list[dict[str, Any]]:
    open_, done = None, list[dict[str, Any]]()
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_ is None
            open_ = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert event["output_index"] == open_ == len(done)
            open_ = None
            done.append(event["item"])
        elif "output_index" in event:
            assert event["output_index"] == open_
    assert events[-1]["response"]["output"] == done
    return done


@SIZES
@pytest.mark.parametrize("calls", [True, False], ids=["tools", "no tools"])
def test_a_chat_has_reasoning_text_and_calls_in_chunks(size: int, calls: bool) -> None:
    events, sample = Written(TEXT, size, calls=calls).streamed(ChatReply)
    found, last = chat_of(events), events[-1]["choices"][0]
    assert found["reasoning_content"] == found["reasoning"] == THOUGHT
    assert found["content"] == ("Two files.Done." if calls else ANSWER)
    assert found["calls"] == (CALLS if calls else [])
    assert last["delta"] == {} and last["finish_reason"] == ("tool_calls" if calls else "stop")
    assert sample.reasoning_tokens == -(-CLOSED // size)


@SIZES
def test_blocks_of_a_message_follow_each_other(size: int) -> None:
    events, _ = Written(TEXT, size).streamed(MessageReply)
    assert blocks_of(events) == [
        ("thinking", THOUGHT, "id"),
        ("text", "Two files.", None),
        *(("tool_use", arguments, None) for arguments in CALLS),
        ("text", "Done.", None),
    ]
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert len({block["id"] for block in started if block["type"] == "tool_use"}) == 2


@SIZES
def test_items_of_a_response_follow_each_other(size: int) -> None:
    events, sample = Written(TEXT, size).streamed(ResponseReply)
    thought, *others = items_of(events)
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}] and thought["summary"] == []
    assert [item["type"] for item in others] == ["message", "function_call", "function_call", "message"]
    assert [item["arguments"] for item in others[1:3]] == CALLS
    own = [event for event in events if event.get("output_index") == 0]
    assert own[0]["item"]["type"] == "reasoning" and own[1]["part"] == {"type": "reasoning_text", "text": ""}
    deltas = [event["delta"] for event in own if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    ends = ["response.reasoning_text.done", "response.content_part.done", "response.output_item.done"]
    assert [event["type"] for event in own[-3:]] == ends
    assert events[-1]["type"] == "response.completed"
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == sample.reasoning_tokens > 0


@pytest.mark.parametrize("shape", [MessageReply, ResponseReply])
def test_an_empty_reply_has_one_empty_block(shape: type[Reply]) -> None:
    names = [event["type"] for event in Written("", 1).streamed(shape)[0]]
    assert sum(name in ("content_block_start", "response.output_item.added") for name in names) == 1
    assert "ping" in names


def check_chat(written: Written, thought: int) -> None:
    """Compare the chunks of a chat with the whole one, and its reasoning tokens with so many."""
    (events, sample), (reply, other) = written.streamed(ChatReply), written.whole(ChatReply)
    found, message = chat_of(events), reply["choices"][0]["message"]
    for name in ("content", "reasoning_content", "reasoning"):
        assert found[name] == (message.get(name) or "")
    assert found["calls"] == [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    assert THOUGHT.startswith(found["reasoning"])
    assert sample.reasoning_tokens == other.reasoning_tokens == thought
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought


def check_limit(end: int) -> None:
    """Compare streams with whole replies where a limit cuts the text; each character is a token."""
    cut = Written(TEXT[:end], 1, "length")
    check_chat(cut, min(end, CLOSED) if end >= len("<think>") else 0)
    (events, _), (message, _) = cut.streamed(MessageReply), cut.whole(MessageReply)
    for (kind, text, signature), block in zip(blocks_of(events), message["content"], strict=True):
        assert (kind, signature) == (block["type"], block.get("signature"))
        if end == len(TEXT) or kind != "tool_use":
            assert text == block.get("text", block.get("thinking", json.dumps(block.get("input"))))
    (events, _), (response, _) = cut.streamed(ResponseReply), cut.whole(ResponseReply)
    items = items_of(events)
    for item in [*items, *response["output"]]:
        item.pop("call_id", None), item.pop("id")
    assert items == response["output"]
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


@pytest.mark.heavy
def test_streams_are_the_whole_replies_at_every_limit() -> None:
    for end in range(len(TEXT) + 1):
        check_limit(end)


@pytest.mark.parametrize("size", [7, 1000])
def test_a_whole_chat_is_its_stream(size: int) -> None:
    check_chat(Written(TEXT, size), -(-CLOSED // size))


def test_a_reply_without_reasoning_has_no_sign_of_it() -> None:
    yes = Written("Yes.", 1)
    reply, sample = yes.whole(ChatReply)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert sample.reasoning_tokens == 0
    assert [kind for kind, *_ in blocks_of(yes.streamed(MessageReply)[0])] == ["text"]


def test_a_marker_s_last_token_counted_as_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    early = lambda sound: lambda sample: max(0, sound(sample) - 1)  # noqa: E731
    check = lambda: check_limit(len(TEXT))  # noqa: E731
    assert_caught(defect("one token too few", Sample.reasoning_tokens, early, check), monkeypatch)
