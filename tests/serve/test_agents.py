"""What coding agents send: thinking, counts, and the requests of Claude Code and Codex CLI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.model.chat import ChatTemplate
from tests.serve.test_ignored_tools import FUNCTION, OTHERS, READ, SHOWN
from tests.support.agent_requests import CLAUDE_CODE, CODEX
from tests.support.serving import Served


def test_counting_counts_what_a_request_would_read(served: Served) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "system": "be brief"}
    tools = [{"name": "read", "input_schema": READ}]
    for more in ({}, {"tools": tools}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        counted = served.client.post("/v1/messages/count_tokens", json={**body, **more}).json()
        usage = served.client.post("/v1/messages", json={**body, **more, "max_tokens": 1}).json()["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    given = {
        "model": "demo",
        "input": "def add(a, b):",
        "instructions": "be brief",
        "tools": [FUNCTION, *OTHERS],
    }
    reply = served.client.post("/v1/responses/input_tokens", json=given)
    usage = served.client.post("/v1/responses", json={**given, "max_output_tokens": 1}).json()["usage"]
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert reply.headers["x-ignored-tools"] == SHOWN
    assert served.client.post("/v1/messages/count_tokens", json={**body, "model": "nope"}).status_code == 404
    assert served.idle()


@pytest.mark.parametrize("thinking", ["adaptive", "enabled", "disabled"])
def test_thinking_and_its_blocks_in_the_past_are_taken(served: Served, thinking: str) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Hello."},
            ],
        },
        {"role": "user", "content": "go on"},
    ]
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": 4, "messages": turns, "temperature": 0,
        "thinking": {"type": thinking, "budget_tokens": 2000, "display": "omitted"},
        "output_config": {"effort": "xhigh", "newer": {"field": 1}}, "context_management": {"edits": []},
    }  # fmt: skip
    reply = served.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "context_management"
    turns[1] = {"role": "assistant", "content": "Hello."}
    plain = served.client.post("/v1/messages", json={**body, "messages": turns}).json()
    assert plain["content"] == reply.json()["content"], "the template of this model reads no reasoning"


# As Qwen 3's template reads them.
REASONS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }};{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_a_template_that_can_reason_is_told_and_sees_earlier_reasoning(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat", ChatTemplate({"default": REASONS}))

    def count(**fields: Any) -> int:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
        return int(served.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    free = count()
    assert count(thinking={"type": "adaptive"}) == count(thinking={"type": "enabled"}) == free
    closed = llm.tokenizer.encode("<think></think>", add_special_tokens=False)
    assert count(thinking={"type": "disabled"}) == free + len(closed)

    def turns(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
        said = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Hello."}]}
        return [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go on"}]

    plain = count(messages=turns())
    assert count(messages=turns({"type": "redacted_thinking", "data": "x"})) == plain
    assert count(messages=turns({"type": "thinking", "thinking": "a reason", "signature": ""})) > plain
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "a reason"}],
    }
    items = [
        {"role": "user", "content": "hi"},
        thought,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "go on"},
    ]
    counted = served.client.post("/v1/responses/input_tokens", json={"model": "demo", "input": items}).json()
    assert counted["input_tokens"] == count(messages=turns({"type": "thinking", "thinking": "a reason"}))


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_claude_code_s_request_is_answered(served: Served) -> None:
    reply = served.client.post("/v1/messages?beta=true", json=CLAUDE_CODE | {"temperature": 0})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "context_management"
    assert "x-ignored-tools" not in reply.headers and "x-unenforced-keywords" not in reply.headers
    found = events(reply.text)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    usage = found[-2]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] <= 512
    body = {key: CLAUDE_CODE[key] for key in ("model", "messages", "tools", "system", "thinking")}
    counted = served.client.post("/v1/messages/count_tokens?beta=true", json=body).json()
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_claude_code_s_tools_can_be_called(served: Served) -> None:
    choice = {"type": "tool", "name": "TaskCreate"}
    body = CLAUDE_CODE | {"temperature": 0, "tool_choice": choice, "stop_sequences": None}
    found = events(served.client.post("/v1/messages?beta=true", json=body).text)
    [begun] = [event for event in found if event["type"] == "content_block_start"]
    assert begun["content_block"]["name"] == "TaskCreate"
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}


def test_codex_s_request_is_answered(served: Served) -> None:
    reply = served.client.post("/v1/responses", json=CODEX | {"temperature": 0, "max_output_tokens": 60})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "client_metadata"
    assert reply.headers["x-ignored-tools"] == "namespace multi_agent_v1, web_search"
    found = events(reply.text)
    assert found[0]["type"] == "response.created" and found[-1]["type"].startswith("response.")
    assert found[-1]["response"]["id"] == found[0]["response"]["id"]
    assert [tool["name"] for tool in found[-1]["response"]["tools"]] == ["exec_command"]
    assert found[-1]["response"]["usage"]["output_tokens"] <= 60


def test_codex_s_tools_can_be_called(served: Served) -> None:
    body = CODEX | {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    body["tools"] = [json.loads(json.dumps(CODEX["tools"][0])), *CODEX["tools"][1:]]
    body["tools"][0]["parameters"]["properties"] = {"cmd": {"const": "cat a"}}
    found = events(served.client.post("/v1/responses", json=body).text)
    [item] = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert item["type"] == "function_call" and item["name"] == "exec_command"
    assert json.loads(item["arguments"]) == {"cmd": "cat a"}
    assert found[-1]["type"] == "response.completed"
    # the call, as the client sends it back, and what came of it
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "zebra"}
    further = body | {"input": [*CODEX["input"], item, result], "tool_choice": "auto", "max_output_tokens": 4}
    assert served.client.post("/v1/responses", json=further).status_code == 200
