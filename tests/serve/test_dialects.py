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
        ({"temperature": -1}, "invalid_request_error"), ({"thinking": {"type": "enabled"}}, "invalid_request_error"),
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
