"""What coding agents send: thinking, counts, the requests of Claude Code and Codex CLI, and tools and keywords that
the server leaves out, which the reply, a header and the log name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.model.chat import ChatTemplate
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, PROMPT, RESPONSES, post
from tests.support.serving import Served, events_of

READ = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
FUNCTION = {"type": "function", "name": "read", "parameters": READ, "strict": False}
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [{**FUNCTION, "name": "hidden"}]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "mcp", "server_label": "wiki", "server_url": "https://example.com"},
]  # fmt: skip
SHOWN = "web_search, namespace mcp__files, custom apply_patch, mcp"


def respond(served: Served, **fields: Any) -> Any:
    return post(served, RESPONSES, **{"max_output_tokens": 60, **fields})


def test_a_response_s_model_sees_functions_alone(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    plain = respond(served, tools=[FUNCTION], max_output_tokens=1).json()
    with caplog.at_level(logging.WARNING, "foredraft.serve"):
        reply = respond(served, tools=[*OTHERS, FUNCTION])
    assert reply.status_code == 200 and reply.headers["x-ignored-tools"] == SHOWN
    assert SHOWN in caplog.text
    found = reply.json()
    assert found["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert found["tools"] == [FUNCTION]
    called = respond(served, tools=[*OTHERS, FUNCTION], tool_choice="required").json()["output"]
    assert {item["name"] for item in called} == {"read"}
    streamed = respond(served, tools=[*OTHERS, FUNCTION], stream=True)
    assert streamed.headers["x-ignored-tools"] == SHOWN


HIDDEN = {"type": "function", "name": "hidden"}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        HIDDEN,
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [HIDDEN]},
    ],
    ids=str,
)
def test_a_choice_of_one_of_them_is_refused(served: Served, choice: dict[str, Any]) -> None:
    reply = respond(served, tools=[*OTHERS, FUNCTION], tool_choice=choice)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice"
    assert served.idle()


def test_none_but_them_are_no_tools(served: Served) -> None:
    assert respond(served, tools=OTHERS).status_code == 200
    assert respond(served, tools=OTHERS, tool_choice="required").status_code == 400
    assert respond(served, tools=[*OTHERS, FUNCTION], tool_choice="auto").status_code == 200


@pytest.mark.parametrize("name", ["read", "stop"])
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_allowed_tools_may_be_called_and_others_only_seen(served: Served, mode: str, name: str) -> None:
    stop = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
    two = [FUNCTION, {"type": "function", **stop}]
    tools = [{"type": "function", "name": name}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    found = respond(served, tools=[*two, *OTHERS], tool_choice=choice, parallel_tool_calls=False).json()
    both = respond(served, tools=two, max_output_tokens=1).json()
    assert found["usage"]["input_tokens"] == both["usage"]["input_tokens"]
    names = [item["name"] for item in found["output"] if item["type"] == "function_call"]
    assert names == [name] if mode == "required" else set(names) <= {name}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
    chat: dict[str, Any] = {
        "tools": [{"type": "function", "function": each} for each in ({"name": "read", "parameters": READ}, stop)],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }  # fmt: skip
    message = post(served, CHAT, max_tokens=60, **chat).json()["choices"][0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert set(calls) == {name} if mode == "required" else set(calls) <= {name}


def test_messages_leave_out_the_tools_of_anthropic_s_servers(served: Served) -> None:
    own = {"name": "read", "input_schema": READ, "cache_control": {"type": "ephemeral"}}
    server = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}

    def read(usage: dict[str, int]) -> int:
        return usage["input_tokens"] + usage["cache_read_input_tokens"]

    plain = post(served, MESSAGE, tools=[own]).json()
    reply = post(served, MESSAGE, max_tokens=60, tools=[server, own], tool_choice={"type": "any"})
    assert reply.headers["x-ignored-tools"] == "web_search"
    assert reply.json()["content"][0]["name"] == "read"
    assert read(reply.json()["usage"]) == read(plain["usage"])
    choice = {"type": "tool", "name": "web_search"}
    assert post(served, MESSAGE, tools=[server, own], tool_choice=choice).status_code == 400


def test_keywords_of_no_grammar_are_named_and_checked(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "object", "required": ["tags"],
        "properties": {"tags": {"type": "array", "items": {"const": "x"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}},
    }  # fmt: skip
    function = {"name": "tag", "parameters": schema}
    body: dict[str, Any] = {
        "max_tokens": 80, "tools": [{"type": "function", "function": function}], "tool_choice": "required",
        "parallel_tool_calls": False,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "foredraft.serve"):
        reply = post(served, CHAT, **body)
        [call] = reply.json()["choices"][0]["message"]["tool_calls"]
        # the rest of the schema holds, and the object is closed, though the model would like to go on
        assert json.loads(call["function"]["arguments"]) == {"tags": ["x", "x"]}
        place = "tag: properties.tags.uniqueItems"
        assert reply.headers["x-unenforced-keywords"] == reply.headers["x-broken-keywords"] == place
        assert caplog.text.count(place) == 1
        streamed = post(served, CHAT, **body, stream=True)
        assert streamed.headers["x-unenforced-keywords"] == place and caplog.text.count(place) == 2
    auto = post(served, CHAT, **body | {"tool_choice": "auto"})
    assert auto.status_code == 200 and auto.headers["x-unenforced-keywords"] == place
    strict = {"type": "function", "function": {**function, "strict": True}}
    refused = post(served, CHAT, **body | {"tools": [strict]})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "'tag'" in message and "properties.tags.uniqueItems" in message


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


def test_the_start_of_a_message_counts_cached_tokens_as_its_end_does(served: Served) -> None:
    body = {
        "model": "demo", "max_tokens": 4, "stream": True, "temperature": 0,
        "messages": [{"role": "user", "content": "A question that is asked twice, word for word. " * 24}],
    }  # fmt: skip
    for cached in (False, True):
        found = events_of(served.client.post("/v1/messages", json=body).text)
        start, end = found[0]["message"]["usage"], found[-2]["usage"]
        assert (end["cache_read_input_tokens"] > end["input_tokens"]) == cached
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert [start[name] for name in names] == [end[name] for name in names]


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
