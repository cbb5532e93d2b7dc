"""Tools, predictions and policies over the APIs, by their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from foredraft.decode.policy import Auto
from foredraft.llm import LLM
from tests.support.loaded import engine_of
from tests.support.serving import Served

READ = {
    "type": "object",
    "properties": {
        "path": {"enum": ["a.py", "b.py"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": READ}},
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "def f("}]
COMMON: dict[str, Any] = {
    "model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 150, "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "read"}},
}  # fmt: skip


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def fits(arguments: Any) -> bool:
    return arguments["path"] in ("a.py", "b.py") and 1 <= arguments["lines"] <= 9 and len(arguments) == 2


def test_a_required_call_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**COMMON).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    [call] = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "read"
    assert fits(json.loads(call.function.arguments))
    with client.chat.completions.stream(**COMMON) as stream:
        names = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in names
    assert streamed.finish_reason == "tool_calls" and not streamed.message.content
    [other] = streamed.message.tool_calls or []
    assert (other.function.name, other.function.arguments) == ("read", call.function.arguments)
    assert len(call.id) == len(other.id) == 9 and call.id != other.id


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
def test_choices_decide_whether_a_text_calls(client: openai.OpenAI, choice: Any) -> None:
    body = {**COMMON, "tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    for found in client.chat.completions.create(**body).choices:
        assert (found.finish_reason == "tool_calls") is (choice == "required")
        assert bool(found.message.tool_calls) is (choice == "required")


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI, llm: LLM) -> None:
    [call] = client.chat.completions.create(**COMMON).choices[0].message.tool_calls or []
    further = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "1"},
    ]
    found = client.chat.completions.create(**{**COMMON, "messages": further, "tool_choice": "auto"})
    assert llm.tokenizer is not None and found.usage is not None
    assert found.usage.prompt_tokens > len(llm.tokenizer.encode(call.function.arguments))


def test_a_call_by_the_messages_api(claude: anthropic.Anthropic) -> None:
    common: Any = {
        "model": "demo", "max_tokens": 150, "messages": MESSAGES, "extra_body": {"temperature": 0},
        "tools": [{"name": "read", "input_schema": READ}], "tool_choice": {"type": "any"},
    }  # fmt: skip
    common["tool_choice"]["disable_parallel_tool_use"] = True
    whole = claude.messages.create(**common)
    assert whole.stop_reason == "tool_use"
    [block] = whole.content
    assert block.type == "tool_use" and block.name == "read" and fits(block.input)
    with claude.messages.stream(**common) as stream:
        final = stream.get_final_message()
    [other] = final.content
    assert other.type == "tool_use" and other.input == block.input and final.stop_reason == "tool_use"
    answer = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "1"}]}
    further: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [answer, {"type": "text", "text": "go on"}]},
    ]
    common |= {"messages": further, "tool_choice": {"type": "auto"}}
    assert claude.messages.create(**common).usage.input_tokens > whole.usage.input_tokens


def test_a_call_by_the_responses_api(client: openai.OpenAI) -> None:
    common: Any = {
        "model": "demo", "max_output_tokens": 150, "input": "def f(", "temperature": 0,
        "tools": [{"type": "function", "name": "read", "parameters": READ, "strict": True}],
        "tool_choice": {"type": "function", "name": "read"},
    }  # fmt: skip
    whole = client.responses.create(**common)
    [item] = whole.output
    assert item.type == "function_call" and item.name == "read" and fits(json.loads(item.arguments))
    with client.responses.stream(**common) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    [other] = final.output
    assert other.type == "function_call" and other.arguments == item.arguments
    assert kinds.count("response.function_call_arguments.done") == 1
    items: Any = [
        {"role": "user", "content": "def f("},
        item.model_dump(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "1"},
    ]
    further = client.responses.create(**{**common, "input": items, "tool_choice": "auto"})
    assert further.usage is not None and whole.usage is not None
    assert further.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"regex": "x"}, "regex"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "zebra"}}}], "tool_choice": "auto"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [{"content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": "x"}, {"content": "x"}], "tool_choice": "auto"}, None),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x"}, "drafter": "lookup"}, "prediction"),
        ({"policy": "fixd"}, "policy"),
        ({"max_draft": 0}, "max_draft"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(
    served: Served, wrong: dict[str, Any], param: str | None, stream: bool
) -> None:
    response = served.client.post("/v1/chat/completions", json={**COMMON, "stream": stream} | wrong)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert served.idle()


def test_a_prediction_is_used_and_counted(served: Served, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    plain = client.chat.completions.create(**body)
    text = plain.choices[0].message.content or ""
    predicted = client.chat.completions.create(**body, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
    details = predicted.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens or 0) > 20 and details.rejected_prediction_tokens == 0
    parts: Any = [{"type": "text", "text": "x" * 300}]
    wrong = client.chat.completions.create(**body, prediction={"type": "content", "content": parts})
    assert wrong.choices[0].message.content == text
    assert wrong.usage is not None and wrong.usage.completion_tokens_details is not None
    assert (wrong.usage.completion_tokens_details.rejected_prediction_tokens or 0) > 0
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_a_request_has_its_policy_and_its_longest_draft(served: Served) -> None:
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def drafting(**own: Any) -> tuple[str, Any]:
        found = served.client.post("/v1/completions", json={**body, "drafter": "draft-model"} | own).json()
        return found["choices"][0]["text"], found["metrics"]["speculative_decoding"]

    text, fixed = drafting()
    assert len(fixed["acceptance_histogram"]) == 5
    for own, longest in (
        ({"max_draft": 2}, 2),
        ({"max_draft": 8}, 8),
        ({"policy": "heuristic", "max_draft": 3}, 3),
    ):
        other, found = drafting(**own)
        assert other == text and len(found["acceptance_histogram"]) == longest


def test_a_request_for_auto_decides_by_measured_costs_though_others_run(served: Served, llm: LLM) -> None:
    """The server's own policy needs no costs, and a server that is never idle could not measure later."""
    assert not engine_of(llm).policy.uses_costs
    body = {"model": "demo", "prompt": "def f(", "ignore_eos": True, "temperature": 0, "stream": True}
    with served.client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400}) as running:
        lines = running.iter_lines()
        next(lines)
        short = {**body, "max_tokens": 8, "policy": "auto", "stream": False}
        assert served.client.post("/v1/completions", json=short).is_success
        assert not served.idle()
        autos = [policy for policy in llm.requests.policies._made.values() if isinstance(policy, Auto)]
        assert len(autos) == 1 and autos[0].measured
