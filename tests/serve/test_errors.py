"""Errors as their clients recognise them: by words, codes, shapes and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from foredraft.llm import LLM
from tests.support.serving import Served, serving

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
LONG = "word " * 700
CHAT, TEXT, RESPONSES, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("messages", {"messages": [{"role": "user", "content": LONG}]}),
    TEXT: ("prompt", {"prompt": LONG}),
    RESPONSES: ("input", {"input": LONG}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOO_LONG)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    served: Served, path: str, stream: bool
) -> None:
    param, fields = TOO_LONG[path]
    asked = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for more in ({}, {asked: 5}):
        reply = served.client.post(path, json={"model": "demo", "stream": stream, **fields, **more})
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "this model's maximum context length is 512 tokens" in error["message"].lower()
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert (asked in error["message"]) is bool(more), "the field is named only where it was given"


def test_a_number_of_tokens_that_does_not_fit_is_named_by_its_own_field(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": "demo", "messages": MESSAGES, name: 1000}
        assert f"lower {name}" in served.client.post(CHAT, json=body).json()["error"]["message"]
    body = {"model": "demo", "prompt": [5] * 500}  # 16 new tokens by default
    message = served.client.post(TEXT, json=body).json()["error"]["message"]
    assert "the reply needs 16" in message and "max_tokens" not in message


def test_a_message_that_is_too_long_is_told_as_anthropic_does(served: Served) -> None:
    says = r"prompt is too long: \d+ tokens > 511 maximum"
    claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with claude, pytest.raises(anthropic.BadRequestError, match=says):
        claude.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": LONG}])


@pytest.mark.parametrize("stream", [False, True])
def test_messages_get_as_many_tokens_as_there_is_room_for(served: Served, stream: bool) -> None:
    body = {"model": "demo", "max_tokens": 32_000, "messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    reply = served.client.post(MESSAGE, json={**body, "stream": stream})
    assert reply.status_code == 200
    if not stream:
        usage, reason = reply.json()["usage"], reply.json()["stop_reason"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 512
        assert reason == "max_tokens"


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (CHAT, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'", "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required", "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name: Field required", "tool_choice"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function: Field required", "tools"),
        (CHAT, {"tools": 5}, "tools: Input should be a valid list", "tools"),
        (CHAT, {"stream_options": 5}, "stream_options: Input should be a valid dictionary", "stream_options"),
        (CHAT, {"messages": None}, "messages: Input should be a valid list", "messages"),
        (TEXT, {"prompt": [["a"]]}, "prompt.0.0: Input should be a valid integer", "prompt"),
        (TEXT, {"prompt": {}}, "prompt: Input should be a valid string", "prompt"),
        (RESPONSES, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'", "tool_choice"),
        (RESPONSES, {"tools": [{"type": "function", "parameters": {}}]}, "tools.0.name: Field required", "tools"),
        (RESPONSES, {"tools": [{"type": 5}]}, "tools.0.type: Input should be a valid string", "tools"),
        (MESSAGE, {"tool_choice": {"type": "always"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'", None),
        (MESSAGE, {"tools": [{"name": "x"}]}, "tools.0.input_schema: Field required", None),
        (MESSAGE, {"max_tokens": None}, "max_tokens: Input should be a valid integer", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_named_by_its_path_in_the_body(
    served: Served, path: str, fields: dict[str, Any], message: str, param: str | None
) -> None:
    needed = {TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(
        path, {"messages": MESSAGES, "max_tokens": 3}
    )
    error = served.client.post(path, json={"model": "demo", **needed, **fields}).json()["error"]
    assert error["message"] == message
    assert path == MESSAGE or error["param"] == param


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_every_refusal_below_messages_has_anthropic_s_shape(llm: LLM, tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serving(llm, api_key_file=keys, max_body=1000) as served:
        own = {"x-api-key": "secret"}
        replies = [
            served.client.post(path, json={}),
            served.client.post(path, json={}, headers=own | {"origin": "http://elsewhere"}),
            served.client.post(path, content=b"x" * 2000, headers=own),
            served.client.post(
                path, json={"model": "nope", "messages": MESSAGES, "max_tokens": 1}, headers=own
            ),
            served.client.delete(path, headers=own),
        ]
    for reply in replies:
        assert 400 <= reply.status_code < 500
        assert reply.json()["type"] == "error" and reply.json()["error"].keys() == {"type", "message"}


def test_either_header_opens_the_models(llm: LLM, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serving(llm, api_key_file=keys) as served:
        for path in ("/v1/models", "/v1/models/demo", "/v1/capabilities"):
            assert served.client.get(path, headers={"x-api-key": "secret"}).is_success
            assert served.client.get(path, headers={"authorization": "Bearer secret"}).is_success
            assert served.client.get(path, headers={"x-api-key": "wrong"}).status_code == 401
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret") as client:
            assert [model.id for model in client.models.list()] == ["demo"]
