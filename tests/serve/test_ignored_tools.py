"""Tools that are no functions: the model does not see them, and the reply, a header and the log say so."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.serving import Served

READ = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
STOP = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "name": "read", "parameters": READ, "strict": False}
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [{**FUNCTION, "name": "hidden"}]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "mcp", "server_label": "wiki", "server_url": "https://example.com"},
]  # fmt: skip
SHOWN = "web_search, namespace mcp__files, custom apply_patch, mcp"
BODY: dict[str, Any] = {"model": "demo", "input": "def f(", "temperature": 0, "max_output_tokens": 60}


def respond(served: Served, **fields: Any) -> Any:
    return served.client.post("/v1/responses", json={**BODY, **fields})


def test_a_response_s_model_sees_functions_alone(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    plain = respond(served, tools=[FUNCTION]).json()
    with caplog.at_level(logging.WARNING, "foredraft.serve"):
        reply = respond(served, tools=[*OTHERS, FUNCTION])
    assert reply.status_code == 200 and reply.headers["x-ignored-tools"] == SHOWN
    assert SHOWN in caplog.text
    found = reply.json()
    assert found["usage"]["input_tokens"] == plain["usage"]["input_tokens"], (
        "the prompt is that of the functions"
    )
    assert found["tools"] == [FUNCTION]
    called = respond(served, tools=[*OTHERS, FUNCTION], tool_choice="required").json()["output"]
    assert {item["name"] for item in called} == {"read"}
    streamed = respond(served, tools=[*OTHERS, FUNCTION], stream=True)
    assert streamed.headers["x-ignored-tools"] == SHOWN


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "hidden"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "hidden"}]},
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
def test_allowed_tools_may_be_called_and_the_others_are_only_seen(
    served: Served, mode: str, name: str
) -> None:
    two = [FUNCTION, {"type": "function", "name": "stop", "parameters": STOP}]
    choice = {
        "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}, {"type": "web_search"}]
    }  # fmt: skip
    found = respond(served, tools=[*two, *OTHERS], tool_choice=choice, parallel_tool_calls=False).json()
    both = respond(served, tools=two).json()
    assert found["usage"]["input_tokens"] == both["usage"]["input_tokens"]
    names = [item["name"] for item in found["output"] if item["type"] == "function_call"]
    assert names == [name] if mode == "required" else set(names) <= {name}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
    chat = {
        "model": "demo", "messages": [{"role": "user", "content": "def f("}], "temperature": 0, "max_tokens": 60,
        "tools": [{"type": "function", "function": {k: v for k, v in each.items() if k != "type"}} for each in two],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }  # fmt: skip
    message = served.client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert set(calls) == {name} if mode == "required" else set(calls) <= {name}


def test_messages_leave_out_the_tools_of_anthropic_s_servers(served: Served) -> None:
    own = {"name": "read", "input_schema": READ, "cache_control": {"type": "ephemeral"}}
    server = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": 60, "temperature": 0, "messages": [{"role": "user", "content": "def f("}],
    }  # fmt: skip
    plain = served.client.post("/v1/messages", json={**body, "tools": [own]}).json()["usage"]
    reply = served.client.post(
        "/v1/messages", json={**body, "tools": [server, own], "tool_choice": {"type": "any"}}
    )
    usage, [block, *_] = reply.json()["usage"], reply.json()["content"]
    assert reply.headers["x-ignored-tools"] == "web_search"
    assert block["name"] == "read"
    assert sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens")) == sum(
        plain[name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    choice = {"type": "tool", "name": "web_search"}
    assert (
        served.client.post(
            "/v1/messages", json={**body, "tools": [server, own], "tool_choice": choice}
        ).status_code
        == 400
    )
