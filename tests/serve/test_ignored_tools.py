"""Tools that are no functions, and keywords that no grammar holds: the reply, a header and the log name them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.serve.routes import CHAT, MESSAGE, RESPONSES, post
from tests.support.serving import Served

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
