"""What coding agents send: thinking, counts, and the requests of Claude Code and Codex CLI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.model.chat import ChatTemplate
from tests.serve.routes import MESSAGE, MESSAGES, PROMPT, RESPONSES, post
from tests.serve.test_ignored_tools import FUNCTION, OTHERS, READ, SHOWN
from tests.support.serving import Served, events_of

# Claude Code 2.1.197 and Codex CLI 0.171.0 send these requests once a tool was called; here are the fields that matter.
DRAFT = "https://json-schema.org/draft/2020-12/schema"
CLOSED = {"additionalProperties": False}


def _zod(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"$schema": DRAFT, "type": "object", "properties": properties, "required": required, **CLOSED}


def _function(
    name: str, description: str, required: list[str] | None = None, **properties: Any
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **CLOSED}
    if required:
        parameters["required"] = required
    about = {"name": name, "description": description, "strict": False}
    return {"type": "function", **about, "parameters": parameters}


LIMIT = {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}
METADATA = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "demo", "max_tokens": 32_000, "stream": True, "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"}, "metadata": {"user_id": '{"session_id":"1"}'},
    "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief.", **CACHED}],
    "tools": [
        {"name": "Read", "description": "Read a file.", "input_schema": _zod(["path"], path={"type": "string"}, limit=LIMIT)},
        {"name": "TaskCreate", "description": "Make a task.",
         "input_schema": _zod(["subject"], subject={"type": "string"}, metadata=METADATA)},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Today</system-reminder>"}, {"type": "text", "text": "Read a."},
        ]},
        {"role": "system", "content": "Kinds of agents: none."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "107e99158", "name": "Read", "input": {"path": "a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "107e99158", "content": "1\tzebra", **CACHED},
        ]},
    ],
}  # fmt: skip

CODEX: dict[str, Any] = {
    "model": "demo", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "1",
    "client_metadata": {"session_id": "1"},
    "tools": [
        _function(
            "exec_command", "Run a command.", cmd={"type": "string"}, tty={"type": "boolean"}, required=["cmd"]
        ),
        {
            "type": "namespace", "name": "multi_agent_v1", "description": "Other agents.",
            "tools": [_function("close_agent", "End one.", target={"type": "string"})],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Read a."}]},
        {"type": "function_call", "status": "completed", "id": "fc_eb2ca7e2a", "name": "exec_command",
         "arguments": '{"cmd": "cat a"}', "call_id": "eb2ca7e2a"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "eb2ca7e2a", "output": "Output:\nzebra"},
    ],
}  # fmt: skip


def test_counting_counts_what_a_request_would_read(served: Served) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "system": "be brief"}
    tools = [{"name": "read", "input_schema": READ}]
    for more in ({}, {"tools": tools}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        counted = served.client.post("/v1/messages/count_tokens", json={**body, **more}).json()
        usage = post(served, MESSAGE, **body, **more).json()["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    given: dict[str, Any] = {"input": PROMPT, "instructions": "be brief", "tools": [FUNCTION, *OTHERS]}
    reply = served.client.post("/v1/responses/input_tokens", json={**given, "model": "demo"})
    usage = post(served, RESPONSES, **given).json()["usage"]
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert reply.headers["x-ignored-tools"] == SHOWN
    assert served.client.post("/v1/messages/count_tokens", json={**body, "model": "nope"}).status_code == 404
    assert served.idle()


@pytest.mark.parametrize("thinking", ["adaptive", "enabled", "disabled"])
def test_thinking_and_its_blocks_in_the_past_are_taken(served: Served, thinking: str) -> None:
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Hello."},
    ]
    body: dict[str, Any] = {
        "thinking": {"type": thinking, "budget_tokens": 2000, "display": "omitted"},
        "output_config": {"effort": "xhigh", "newer": {"field": 1}}, "context_management": {"edits": []},
    }  # fmt: skip
    said = {"role": "assistant", "content": blocks}
    reply = post(served, MESSAGE, messages=[*MESSAGES, said, *MESSAGES], **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "context_management"


# As Qwen 3's template reads them.
REASONS = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }};{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_a_template_that_can_reason_is_told(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat", ChatTemplate({"default": REASONS}))

    def count(**fields: Any) -> int:
        body = {"model": "demo", "messages": MESSAGES, **fields}
        return int(served.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    free = count()
    assert count(thinking={"type": "adaptive"}) == count(thinking={"type": "enabled"}) == free
    closed = llm.tokenizer.encode("<think></think>", add_special_tokens=False)
    assert count(thinking={"type": "disabled"}) == free + len(closed)

    def turns(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
        said = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Hello."}]}
        return [*MESSAGES, said, *MESSAGES]

    plain = count(messages=turns())
    assert count(messages=turns({"type": "redacted_thinking", "data": "x"})) == plain
    assert count(messages=turns({"type": "thinking", "thinking": "a reason", "signature": ""})) > plain
    thought = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "a reason"}]}
    items = [*MESSAGES, thought | {"summary": []}, {"role": "assistant", "content": "Hello."}, *MESSAGES]
    counted = served.client.post("/v1/responses/input_tokens", json={"model": "demo", "input": items}).json()
    assert counted["input_tokens"] == count(messages=turns({"type": "thinking", "thinking": "a reason"}))


def test_claude_code_s_request_is_answered(served: Served) -> None:
    reply = served.client.post("/v1/messages?beta=true", json=CLAUDE_CODE | {"temperature": 0})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "context_management"
    assert "x-ignored-tools" not in reply.headers and "x-unenforced-keywords" not in reply.headers
    kinds = [event["type"] for event in events_of(reply.text)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_claude_code_s_tools_can_be_called(served: Served) -> None:
    choice = {"type": "tool", "name": "TaskCreate"}
    body = CLAUDE_CODE | {"temperature": 0, "tool_choice": choice, "stop_sequences": None}
    found = events_of(served.client.post("/v1/messages?beta=true", json=body).text)
    [begun] = [event for event in found if event["type"] == "content_block_start"]
    assert begun["content_block"]["name"] == "TaskCreate"
    deltas = {event["delta"]["type"] for event in found if event["type"] == "content_block_delta"}
    assert deltas == {"input_json_delta"}


def test_codex_s_request_is_answered(served: Served) -> None:
    reply = served.client.post("/v1/responses", json=CODEX | {"temperature": 0, "max_output_tokens": 60})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "client_metadata"
    assert reply.headers["x-ignored-tools"] == "namespace multi_agent_v1, web_search"
    found = events_of(reply.text)
    assert found[0]["type"] == "response.created" and found[-1]["type"].startswith("response.")
    assert found[-1]["response"]["id"] == found[0]["response"]["id"]
    assert [tool["name"] for tool in found[-1]["response"]["tools"]] == ["exec_command"]
    assert found[-1]["response"]["usage"]["output_tokens"] <= 60


def test_codex_s_tools_can_be_called(served: Served) -> None:
    body = CODEX | {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    body["tools"] = [json.loads(json.dumps(CODEX["tools"][0])), *CODEX["tools"][1:]]
    body["tools"][0]["parameters"]["properties"] = {"cmd": {"const": "cat a"}}
    found = events_of(served.client.post("/v1/responses", json=body).text)
    [item] = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert item["type"] == "function_call" and item["name"] == "exec_command"
    assert json.loads(item["arguments"]) == {"cmd": "cat a"}
    assert found[-1]["type"] == "response.completed"
    # the call, as the client sends it back, and what came of it
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "zebra"}
    further = body | {"input": [*CODEX["input"], item, result], "tool_choice": "auto", "max_output_tokens": 4}
    assert served.client.post("/v1/responses", json=further).status_code == 200
