"""Errors as their clients recognise them: by words, codes, shapes and paths, before a stream begins."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from foredraft.llm import LLM
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, NEEDED, RESPONSES, TEXT, post
from tests.support.serving import Served, serving

KEYS = {"message", "type", "param", "code"}
LONG = "word " * 700
ONE, STOP = (
    {"type": "function", "function": {"name": "x"}},
    {"type": "function", "function": {"name": "stop"}},
)
# A route, wrong fields, and what the message begins with; the first field is the wrong one.
BOTH: dict[str, Any] = {
    "suffix": "x", "best_of": 3, "audio": {}, "modalities": ["audio"], "web_search_options": {},
    "bad_words": ["x"], "banned_strings": ["x"], "structured_outputs": {}, "guided_choice": [],
    "stop_token_ids": ["x"], "allowed_token_ids": [], "n_predict": -2,
    "truncate_prompt_tokens": 0, "prompt_logprobs": 21, "max_new_tokens": 3, "min_new_tokens": 3,
    "ebnf": "root ::= other", "guided_regex": "[a-",
    "repeat_penalty": 1.5, "json_schema": {}, "json_object": True, "chat_template": "x", "documents": [{}], "add_special_tokens": False,
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, {name: value}, "") for path in (CHAT, TEXT) for name, value in BOTH.items()),
    (TEXT, {"temperature": -1}, ""), (TEXT, {"temperature": "hot"}, ""), (TEXT, {"top_p": 0}, ""), (TEXT, {"n": 0}, ""),
    (TEXT, {"n": True}, ""), (TEXT, {"max_tokens": -1}, ""), (TEXT, {"min_tokens": 99}, ""), (TEXT, {"stop": [""]}, ""),
    (TEXT, {"stop": 3}, ""), (TEXT, {"logit_bias": {"x": 1}}, ""), (TEXT, {"logit_bias": {"999999": 1}}, ""),
    (TEXT, {"logit_bias": {"9" * 5000: 1}}, ""), (TEXT, {"regex": "[a-"}, ""), (TEXT, {"logprobs": 21}, ""),
    (TEXT, {"echo": True, "truncate_prompt": "left"}, ""), (TEXT, {"response_format": {"type": "xml"}}, ""),
    (TEXT, {"response_format": {"type": "json_schema"}}, ""),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}}, "the answer is strict"),
    (TEXT, {"drafter": "oracle"}, ""), (TEXT, {"tools": [{"type": "function"}]}, ""), (TEXT, {"guided_json": {"not": {}}}, ""),
    (TEXT, {"prompt": ""}, ""), (TEXT, {"prompt": []}, ""), (TEXT, {"prompt": [[]]}, ""), (TEXT, {"prompt": ["x", ""]}, ""),
    (TEXT, {"prompt": [["a"]]}, "prompt.0.0: Input should be a valid integer"),
    (TEXT, {"prompt": {}}, "prompt: Input should be a valid string"),
    (TEXT, {"messages": MESSAGES}, ""), (TEXT, {"max_completion_tokens": 3}, ""), (TEXT, {"top_logprobs": 1}, ""),
    (TEXT, {"add_generation_prompt": False}, ""), (TEXT, {"continue_final_message": True}, ""),
    (TEXT, {"chat_template_kwargs": {"a": 1}}, ""), (TEXT, {"logprobs": True}, ""), (TEXT, {"echo": "yes"}, ""),
    (CHAT, {"prompt": "x"}, ""), (CHAT, {"echo": True}, ""), (CHAT, {"logprobs": 1}, ""), (CHAT, {"top_logprobs": 1}, ""),
    (CHAT, {"continue_final_message": True}, ""), (CHAT, {"stream_options": 5}, "stream_options: Input should be a valid dictionary"),
    (CHAT, {"messages": None}, "messages: Input should be a valid list"), (CHAT, {"messages": "x"}, ""), (CHAT, {"messages": []}, ""),
    (CHAT, {"messages": [3]}, ""), (CHAT, {"messages": [{"role": "user", "content": 3}]}, ""),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, ""),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]}, ""),
    (CHAT, {"tools": 5}, "tools: Input should be a valid list"), (CHAT, {"tools": [{"type": "retrieval"}]}, ""),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function: Field required"), (CHAT, {"tools": [ONE] * 2}, ""), (CHAT, {"tools": [ONE] * 130}, ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "zebra"}}}]}, "the schema of the tool 'x' is no JSON schema: type: "),
    (CHAT, {"tool_choice": "required"}, ""), (CHAT, {"tool_choice": ONE, "tools": [STOP]}, ""),
    (CHAT, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name: Field required"),
    (CHAT, {"regex": "x", "tools": [ONE], "tool_choice": "required"}, ""), (CHAT, {"functions": [{"name": "x"}]}, ""),
    (CHAT, {"prediction": {"type": "content"}}, ""), (CHAT, {"prediction": {"type": "content", "content": [{"type": "image"}]}}, ""),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "drafter": "lookup"}, ""),
    (CHAT, {"policy": "fixd"}, ""), (CHAT, {"max_draft": 0}, ""),
    (RESPONSES, {"n": 2}, ""), (RESPONSES, {"max_tokens": 3}, ""), (RESPONSES, {"messages": MESSAGES}, ""), (RESPONSES, {"input": 3}, ""),
    (RESPONSES, {"input": [{"type": "file"}]}, ""), (RESPONSES, {"response_format": {"type": "json_object"}}, ""),
    (RESPONSES, {"logprobs": True}, ""), (RESPONSES, {"provenance": True}, ""), (RESPONSES, {"previous_response_id": "x"}, ""),
    (RESPONSES, {"conversation": "x"}, ""), (RESPONSES, {"background": True}, ""), (RESPONSES, {"top_logprobs": 21}, ""),
    (RESPONSES, {"prompt_logprobs": 1}, ""), (RESPONSES, {"tool_choice": "always"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (RESPONSES, {"tools": [{"type": "function", "parameters": {}}]}, "tools.0.name: Field required"),
    (RESPONSES, {"tools": [{"type": 5}]}, "tools.0.type: Input should be a valid string"),
    (MESSAGE, {"n": 2}, ""), (MESSAGE, {"stop": "x"}, ""), (MESSAGE, {"logprobs": True}, ""), (MESSAGE, {"max_completion_tokens": 3}, ""),
    (MESSAGE, {"provenance": True}, ""), (MESSAGE, {"mcp_servers": [{}]}, ""), (MESSAGE, {"messages": []}, ""),
    (MESSAGE, {"temperature": -1}, ""), (MESSAGE, {"thinking": {"type": "deep"}}, ""), (MESSAGE, {"max_tokens": "x"}, ""),
    (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ""),
    (MESSAGE, {"max_tokens": None}, "max_tokens: Input should be a valid integer"), (MESSAGE, {"output_format": {"type": "text"}}, ""),
    (MESSAGE, {"tools": [{"name": "x"}]}, "tools.0.input_schema: Field required"),
    (MESSAGE, {"tool_choice": {"type": "always"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "says"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_field_is_refused_by_its_path_before_a_stream_begins(
    served: Served, path: str, fields: dict[str, Any], says: str, stream: bool
) -> None:
    reply = post(served, path, **fields, stream=stream)
    name, error = next(iter(fields)), reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["message"].startswith(says) if says else name in error["message"]
    assert "\n" not in error["message"]
    if path == MESSAGE:
        assert reply.json()["type"] == "error" and error["type"] == "invalid_request_error"
    else:
        assert set(error) == KEYS and error["param"] == name
    served.wait(served.idle)


def test_what_no_one_field_is_wrong_about_is_refused(served: Served) -> None:
    for path, fields, status in (
        (TEXT, {"model": "gpt-9"}, 404), (MESSAGE, {"model": "nope"}, 404), (TEXT, {"prompt": [10**9]}, 400),
        (TEXT, {"prompt": "\ud800"}, 400), (TEXT, {"stream_options": {"include_usage": True}}, 400),
        (CHAT, {"messages": [{}]}, 400), (CHAT, {"messages": [{"content": "x"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        (CHAT, {"messages": [*MESSAGES, {"content": "x"}], "tools": [ONE]}, 400),
    ):  # fmt: skip
        assert post(served, path, **fields).status_code == status, (path, fields)
    for path, needed in NEEDED.items():
        assert served.client.post(path, json=needed).json()["model"] == "demo", "it may be left out"
    assert served.idle()


@pytest.mark.parametrize("path", [*NEEDED, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [b'{"model": "demo", "x": "\xff\xfe"}', b"\xc3(", b'{"model": NaN}', b'{"temperature": Infinity}',
     b'{"seed": 1' + b"0" * 5000 + b"}", b'{"model": "demo",}', b"[1]", b'"x"', b"", b"{", b"{" * 9999, b"[" * 50_000],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_what_is_no_json_object_is_refused(served: Served, path: str, content: bytes) -> None:
    reply = served.client.post(path, content=content)
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]
    assert path == MESSAGE or reply.json()["error"]["code"] == "invalid_json"


def test_numbers_and_texts_that_no_reply_could_repeat_are_refused(served: Served) -> None:
    for value in ("1e999", "-1e999", '"\\ud800"', '{"\\uDFFF": 1}', '["\\ude00\\ud83d"]', '"\ud800"'):
        for path, prompt in ((RESPONSES, '"input"'), (TEXT, '"prompt"')):
            body = f'{{"model": "demo", {prompt}: "x", "metadata": {{"a": {value}}}}}'
            refused = served.client.post(path, content=body.encode(errors="surrogatepass"))
            assert refused.status_code == 400, (path, value)
            assert refused.json()["error"]["code"] == "invalid_json"
    pair = '{"input": "x", "max_output_tokens": 1, "metadata": {"a": "\\ud83d\\ude00"}}'
    assert served.client.post(RESPONSES, content=pair).json()["metadata"] == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((TEXT, field) for field in ("prompt", "stop", "ban")),
        *((MESSAGE, field) for field in ("messages", "system", "stop_sequences", "tools")),
        (CHAT, "messages"),
        (RESPONSES, "input"),
        (RESPONSES, "tools"),
    ],
)
def test_a_long_list_with_a_wrong_item_is_refused_at_once(served: Served, path: str, field: str) -> None:
    begun = time.process_time()
    assert post(served, path, **{field: [1] * 250_000 + ["x"] * (field == "prompt")}).status_code == 400
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "max_tokens"),
        (TEXT, {"prompt": LONG}, "max_tokens"),
        (RESPONSES, {"input": LONG}, "max_output_tokens"),
    ],
    ids=[CHAT, TEXT, RESPONSES],
)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(
    served: Served, path: str, fields: dict[str, Any], asked: str, stream: bool
) -> None:
    for more in ({asked: None}, {asked: 5}):
        reply = post(served, path, **fields, **more, stream=stream)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "this model's maximum context length is 512 tokens" in error["message"].lower()
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(fields)))
        assert (asked in error["message"]) is bool(more[asked]), "the field is named only where it was given"
    error = post(served, path, **{asked: 10**6}, stream=stream).json()["error"]
    assert f"{asked} asks for 1000000" in error["message"] and error["code"] == "context_length_exceeded"


def test_a_number_of_tokens_that_does_not_fit_is_named_by_its_own_field(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": "demo", "messages": MESSAGES, name: 1000}
        assert f"lower {name}" in served.client.post(CHAT, json=body).json()["error"]["message"]
    message = post(served, TEXT, prompt=[5] * 500, max_tokens=None).json()["error"]["message"]
    assert "the reply needs 16" in message and "max_tokens" not in message


def test_a_message_that_is_too_long_is_told_as_anthropic_does(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
        claude.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": LONG}])


def test_messages_get_as_many_tokens_as_there_is_room_for(served: Served) -> None:
    reply = post(served, MESSAGE, max_tokens=32_000, ignore_eos=True)
    assert reply.status_code == 200 and reply.json()["stop_reason"] == "max_tokens"
    usage = reply.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 512


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_every_refusal_below_messages_has_anthropic_s_shape(llm: LLM, keys: Path, path: str) -> None:
    own = {"x-api-key": "one"}
    with serving(llm, api_key_file=keys, max_body=1000) as served:
        body = {"model": "nope", "messages": MESSAGES, "max_tokens": 1}
        replies = {
            "authentication_error": served.client.post(path, json={}),
            "permission_error": served.client.post(path, json={}, headers=own | {"origin": "http://else"}),
            "request_too_large": served.client.post(path, content=b"x" * 2000, headers=own),
            "not_found_error": served.client.post(path, json=body, headers=own),
            "invalid_request_error": served.client.delete(path, headers=own),
        }
    for kind, reply in replies.items():
        assert 400 <= reply.status_code < 500 and reply.json()["type"] == "error"
        assert reply.json()["error"].keys() == {"type", "message"}
        assert reply.json()["error"]["type"] == kind or path.endswith("batches")


def test_a_key_may_come_in_the_header_of_either_api(llm: LLM, keys: Path) -> None:
    with serving(llm, api_key_file=keys) as served:
        for path in ("/v1/models", "/v1/models/demo", "/v1/capabilities"):
            for headers, status in (
                ({"x-api-key": "one"}, 200), ({"authorization": "Bearer one"}, 200), ({"x-api-key": "no"}, 401), ({}, 401),
            ):  # fmt: skip
                assert served.client.get(path, headers=headers).status_code == status, (path, headers)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="one") as client:
            assert [model.id for model in client.models.list()] == ["demo"]
