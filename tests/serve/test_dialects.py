"""Two more shapes of the API, by their own clients: Anthropic's messages, and OpenAI's responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from foredraft.llm import LLM
from tests.support.serving import Served, serving

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def text_of(llm: LLM, messages: list[Any], **params: Any) -> str:
    [output] = llm.chat(messages, drafter="none", temperature=0, **params)
    return str(output.text)


def test_messages_whole_and_streamed_are_the_library_s_text(
    served: Served, claude: anthropic.Anthropic, llm: LLM
) -> None:
    common: dict[str, Any] = {
        "model": "demo", "max_tokens": 30, "messages": MESSAGES, "system": "be brief", "extra_body": {"temperature": 0},
    }  # fmt: skip
    want = text_of(llm, [{"role": "system", "content": "be brief"}, *MESSAGES], max_new_tokens=30)
    whole = claude.messages.create(**common)
    assert whole.content[0].type == "text" and whole.content[0].text == want
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 30
    with claude.messages.stream(**common) as stream:
        assert "".join(stream.text_stream) == want
        final = stream.get_final_message()
    assert final.usage == whole.usage and final.stop_reason == "max_tokens"
    assert served.idle()


def test_messages_stop_at_their_sequences(claude: anthropic.Anthropic, llm: LLM) -> None:
    free = text_of(llm, MESSAGES, max_new_tokens=30)
    word = free.split()[1]
    found = claude.messages.create(
        model="demo", max_tokens=30, messages=MESSAGES, stop_sequences=[word], extra_body={"temperature": 0}
    )
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == word
    assert found.content[0].type == "text" and found.content[0].text == free[: free.index(word)]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"max_tokens": "x"}, "invalid_request_error"), ({"messages": []}, "invalid_request_error"),
        ({"tools": [{"name": "x"}]}, "invalid_request_error"), ({"model": "nope"}, "not_found_error"),
        ({"temperature": -1}, "invalid_request_error"), ({"thinking": {"type": "deep"}}, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_request_error"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_messages_have_the_shape_of_that_api(served: Served, wrong: dict[str, Any], kind: str) -> None:
    body = {"model": "demo", "max_tokens": 3, "messages": MESSAGES, "stream": True} | wrong
    found = served.client.post("/v1/messages", json=body)
    assert 400 <= found.status_code < 500, found.text
    assert found.json()["type"] == "error" and found.json()["error"]["type"] == kind
    assert served.idle()


def test_responses_whole_and_streamed_are_the_library_s_text(
    served: Served, client: openai.OpenAI, llm: LLM
) -> None:
    common: dict[str, Any] = {
        "model": "demo", "max_output_tokens": 30, "instructions": "be brief", "input": "def add(a, b):",
        "temperature": 0,
    }  # fmt: skip
    want = text_of(llm, [{"role": "system", "content": "be brief"}, *MESSAGES], max_new_tokens=30)
    whole = client.responses.create(**common)
    assert whole.output_text == want and whole.status == "incomplete"
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**common) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == want
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "def add(a, b):"}]}]
    assert client.responses.create(**{**common, "input": parts}).output_text == want
    assert served.idle()


def test_responses_take_a_schema_and_refuse_what_they_lack(served: Served, client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    found = client.responses.create(model="demo", input="x", text=form, max_output_tokens=40)
    assert json.loads(found.output_text)["a"] in ("x", "y") and found.status == "completed"
    for wrong in (
        {"tools": [{"type": "function"}]},
        {"previous_response_id": "x"},
        {"input": 3},
        {"input": [{"type": "file"}]},
    ):
        refused = served.client.post("/v1/responses", json={"model": "demo", "input": "x", **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] in wrong


def test_a_key_may_come_in_the_header_of_either_api(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    body = {"model": "demo", "max_tokens": 1, "messages": MESSAGES}
    with serving(llm, api_key_file=file) as served:
        for headers, status in (
            ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "no"}, 401), ({}, 401),
        ):  # fmt: skip
            assert served.client.post("/v1/messages", json=body, headers=headers).status_code == status


READ = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py"]}},
    "required": ["path"],
    "additionalProperties": False,
}
CALL: dict[str, Any] = {
    "model": "demo", "temperature": 0, "tools": [{"type": "function", "name": "read", "parameters": READ}],
    "tool_choice": "required", "parallel_tool_calls": False, "metadata": {"a": "b"}, "instructions": "call",
    "input": "def f(", "top_p": 0.5,
}  # fmt: skip


def test_input_tokens_of_messages_are_those_that_no_cache_had(llm: LLM) -> None:
    """The stream's last event says it, too, since its first one comes before the prompt is read."""
    long: list[Any] = [{"role": "user", "content": "word " * 150}]
    common: Any = {"model": "demo", "max_tokens": 4, "messages": long}
    with (
        serving(llm, prefix_cache=64) as served,
        anthropic.Anthropic(base_url=served.url, api_key="none") as claude,
    ):
        first, second = (claude.messages.create(**common).usage for _ in range(2))
        with claude.messages.stream(**common) as stream:
            streamed = stream.get_final_message().usage
    assert first.cache_read_input_tokens == 0 and first.input_tokens > 300
    assert second.cache_read_input_tokens and second.cache_read_input_tokens >= 64
    for usage in (second, streamed):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == first.input_tokens
        assert usage.cache_creation_input_tokens == 0
    assert streamed.cache_read_input_tokens == second.cache_read_input_tokens


def test_a_begun_reply_goes_on(served: Served, claude: anthropic.Anthropic, llm: LLM) -> None:
    assert llm.tokenizer is not None
    begun = {"role": "assistant", "content": "    return"}
    ids = llm.tokenizer.encode_chat([*MESSAGES, begun], continue_final_message=True)
    [want] = llm.generate([ids], temperature=0, max_new_tokens=8)
    more: Any = {"extra_body": {"temperature": 0}}
    found = claude.messages.create(model="demo", max_tokens=8, messages=[*MESSAGES, begun], **more)  # type: ignore[list-item]
    assert found.content[0].type == "text" and found.content[0].text == want.text
    body = {"model": "demo", "messages": [*MESSAGES, begun], "temperature": 0, "max_tokens": 8}
    for fields in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        chat = served.client.post(
            "/v1/chat/completions", json={**body, "continue_final_message": True, **fields}
        ).json()
        assert chat["choices"][0]["message"]["content"] == want.text
        assert chat["usage"]["prompt_tokens"] == len(ids)
    plain = {"model": "demo", "messages": MESSAGES, "max_tokens": 1, "add_generation_prompt": False}
    usage = served.client.post("/v1/chat/completions", json=plain).json()["usage"]
    assert usage["prompt_tokens"] == len(llm.tokenizer.encode_chat(MESSAGES, add_generation_prompt=False))
    silent = {"role": "assistant", "content": None}
    for wrong in (
        {"messages": MESSAGES}, {"add_generation_prompt": True}, {"messages": [*MESSAGES, silent]},
    ):  # fmt: skip
        refused = served.client.post(
            "/v1/chat/completions", json={**body, "continue_final_message": True, **wrong}
        )
        assert refused.status_code == 400, wrong


def test_the_form_and_the_errors_of_tools_are_honoured_in_messages(served: Served, llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    body = {"model": "demo", "max_tokens": 40, "messages": MESSAGES, "temperature": 0}
    for field in ({"output_format": form}, {"output_config": {"format": form, "effort": "low"}}):
        reply = served.client.post("/v1/messages", json=body | field).json()
        assert json.loads(reply["content"][0]["text"]) == {"a": 1}
    wrong = served.client.post("/v1/messages", json=body | {"output_format": {"type": "text"}})
    assert wrong.status_code == 400 and "output_format" in wrong.json()["error"]["message"]
    assert served.client.post(
        "/v1/messages", json=body | {"messages": [{"role": "user", "content": []}]}
    ).is_success

    def tokens(result: dict[str, Any]) -> int:
        use = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
        turns = [
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no", **result}],
            },
        ]
        reply = served.client.post("/v1/messages", json=body | {"messages": [*MESSAGES, *turns]}).json()
        return int(reply["usage"]["input_tokens"])

    assert tokens({"is_error": True}) > tokens({})


def test_a_response_repeats_its_request(client: openai.OpenAI) -> None:
    whole = client.responses.create(max_output_tokens=60, **CALL)
    assert whole.status == "completed" and whole.output[0].type == "function_call"
    assert whole.tool_choice == "required" and whole.parallel_tool_calls is False and whole.top_p == 0.5
    assert whole.metadata == {"a": "b"} and whole.instructions == "call" and whole.max_output_tokens == 60
    assert [tool.name for tool in whole.tools if tool.type == "function"] == ["read"]


def test_a_call_that_the_limit_cuts_is_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(max_output_tokens=60, **CALL)
    assert whole.usage is not None and whole.output[0].type == "function_call"
    for limit in range(whole.usage.output_tokens - 1, 0, -1):  # cut within the arguments
        cut = client.responses.create(max_output_tokens=limit, **CALL)
        if cut.output[0].type == "function_call" and cut.output[0].arguments[-1:] not in ("", "}"):
            break
    assert cut.status == "incomplete" and cut.output[0].status == "incomplete"
    with client.responses.stream(max_output_tokens=limit, **CALL) as stream:
        seen = list(stream)
    kinds = [event.type for event in seen]
    assert kinds[-1] == "response.incomplete" and "response.function_call_arguments.done" not in kinds
    [done] = [event for event in seen if event.type == "response.output_item.done"]
    assert done.item.status == "incomplete"  # type: ignore[union-attr]


def test_a_text_and_the_calls_after_it_are_one_turn(served: Served, llm: LLM) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "I look.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    common = {"model": "demo", "temperature": 0}
    reply = served.client.post("/v1/responses", json=common | {"input": items, "max_output_tokens": 2}).json()
    chat = served.client.post(
        "/v1/chat/completions", json=common | {"messages": messages, "max_tokens": 2}
    ).json()
    assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_what_no_reply_has_may_be_included_and_truncation_is_honoured(served: Served) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "hi", "max_output_tokens": 1}
    harmless = served.client.post("/v1/responses", json=body | {"include": ["reasoning.encrypted_content"]})
    assert harmless.is_success
    long = body | {"input": "word " * 700}
    assert served.client.post("/v1/responses", json=long).status_code == 400
    assert served.client.post("/v1/responses", json=long | {"truncation": "auto"}).is_success


def test_every_refusal_of_messages_has_that_api_s_shape(llm: LLM) -> None:
    with serving(llm, max_body=1000) as served:
        large = served.client.post("/v1/messages", content=b"x" * 2000)
        foreign = served.client.post("/v1/messages", json={}, headers={"origin": "http://elsewhere"})
        wrong = served.client.get("/v1/messages")
    kinds = [each.json()["error"]["type"] for each in (large, foreign, wrong)]
    assert kinds == ["request_too_large", "permission_error", "invalid_request_error"]
    assert all(each.json()["type"] == "error" for each in (large, foreign, wrong))


def test_calls_of_the_past_are_told_without_tools(served: Served, llm: LLM) -> None:
    """The template of this model knows no calls."""
    assert llm.tokenizer is not None
    past: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "read", "arguments": '{"p": 1}'},
    }
    messages = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    told = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "read", "arguments": {"p": 1}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"},
    ]
    body = {"model": "demo", "messages": messages, "max_tokens": 1}
    reply = served.client.post("/v1/chat/completions", json=body).json()
    assert reply["usage"]["prompt_tokens"] == len(llm.tokenizer.encode_chat(told))
