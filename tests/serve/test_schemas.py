"""Schemas of tools and answers over the API: what is held, named, checked and refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.support.serving import Served


def test_keywords_that_no_grammar_holds_are_named_and_checked(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "object", "required": ["tags"],
        "properties": {"tags": {"type": "array", "items": {"const": "x"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}},
    }  # fmt: skip
    function = {"name": "tag", "parameters": schema}
    body: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "def f("}], "temperature": 0, "max_tokens": 80,
        "tools": [{"type": "function", "function": function}], "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "foredraft.serve"):
        reply = served.client.post("/v1/chat/completions", json=body)
        [call] = reply.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"tags": ["x", "x"]}, (
            "the rest of the schema holds"
        )
        place = "tag: properties.tags.uniqueItems"
        assert reply.headers["x-unenforced-keywords"] == reply.headers["x-broken-keywords"] == place
        assert caplog.text.count(place) == 1
        streamed = served.client.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.headers["x-unenforced-keywords"] == place and caplog.text.count(place) == 2
    auto = served.client.post("/v1/chat/completions", json={**body, "tool_choice": "auto"})
    assert auto.status_code == 200 and auto.headers["x-unenforced-keywords"] == place
    strict = {"type": "function", "function": {**function, "strict": True}}
    refused = served.client.post("/v1/chat/completions", json={**body, "tools": [strict]})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "'tag'" in message and "properties.tags.uniqueItems" in message


def test_arguments_have_no_invented_keys(served: Served) -> None:
    """An object that lists its properties is closed; the model would like to go on with others."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    body: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "def f("}], "temperature": 0, "max_tokens": 80,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {},
    }  # fmt: skip
    [call] = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"][
        "tool_calls"
    ]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    text = {k: v for k, v in body.items() if k not in ("tools", "tool_choice", "parallel_tool_calls")}
    reply = served.client.post("/v1/chat/completions", json={**text, "response_format": answer}).json()
    assert json.loads(reply["choices"][0]["message"]["content"]) == {"a": 1}
