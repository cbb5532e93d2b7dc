"""Items of a response's input as chat messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.serve.conversation import messages_of_items
from foredraft.serve.problems import Problem

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "read", "arguments": '{"a": 1}'}
CALLED = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    said = {"content": [{"type": "text", "text": "I look."}], "reasoning_content": "why"}
    made = messages_of_items([USER, thought, text, CALL])
    assert made == [USER, {"role": "assistant", **said, "tool_calls": [CALLED]}]
    assert messages_of_items([thought, CALL])[0]["reasoning_content"] == "why"
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    assert messages_of_items([summary, CALL])[0]["reasoning_content"] == "so"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "alone"}]},
        {"type": "item_reference", "id": "rs_1"},
    ],
    ids=str,
)
def test_reasoning_that_nothing_follows_or_only_its_server_reads_is_dropped(
    item: dict[str, Any],
) -> None:
    assert messages_of_items([USER, item]) == [USER]


def test_a_refusal_is_what_the_assistant_said() -> None:
    [made] = messages_of_items([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}])
    assert made["content"][0]["text"] == "No." and made["content"][0]["type"] == "text"


def test_calls_of_tools_with_free_text_and_their_results_are_told() -> None:
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    made = messages_of_items([custom, result])
    [call] = made[0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"input": "*** Begin"}
    assert made[1] == {"role": "tool", "tool_call_id": "1", "content": "done"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"type": "item_reference", "id": "msg_1"}, '"store": false'),
        ({"type": "item_reference"}, '"store": false'),
        ({"type": "computer_call"}, "computer_call"),
        ({"type": ["message"]}, "not supported"),
    ],
    ids=str,
)
def test_what_stands_elsewhere_or_is_not_known_is_refused(item: dict[str, Any], says: str) -> None:
    with pytest.raises(Problem, match=says):
        messages_of_items([USER, item])
