"""Further shapes of the API, tools, predictions and policies, by their own clients."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from foredraft.decode.policy.auto import Auto
from foredraft.llm import LLM
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, PROMPT, RESPONSES, TEXT, post, record
from tests.support.loaded import engine_of
from tests.support.serving import Served, serving

READ = record(path={"enum": ["a.py"]})


def text_of(llm: LLM, messages: list[Any], **params: Any) -> str:
    [output] = llm.chat(messages, drafter="none", temperature=0, **params)
    return str(output.text)


def test_messages_are_the_library_s_text(served: Served, claude: anthropic.Anthropic, llm: LLM) -> None:
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


def test_responses_are_the_library_s_text(served: Served, client: openai.OpenAI, llm: LLM) -> None:
    common: dict[str, Any] = {
        "model": "demo", "max_output_tokens": 30, "instructions": "be brief", "input": PROMPT, "temperature": 0,
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


def test_responses_take_a_schema(client: openai.OpenAI) -> None:
    schema = record(a={"enum": ["x", "y"]})
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    found = client.responses.create(model="demo", input="x", text=form, max_output_tokens=40)
    assert json.loads(found.output_text)["a"] in ("x", "y") and found.status == "completed"


CALL: dict[str, Any] = {
    "model": "demo", "temperature": 0, "tools": [{"type": "function", "name": "read", "parameters": READ}],
    "tool_choice": "required", "parallel_tool_calls": False, "metadata": {"a": "b"}, "instructions": "call",
    "input": "def f(", "top_p": 0.5,
}  # fmt: skip


def test_input_tokens_of_messages_are_those_that_no_cache_had(llm: LLM) -> None:
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
    body = {"messages": [*MESSAGES, begun], "max_tokens": 8, "continue_final_message": True}
    for fields in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        chat = post(served, CHAT, **body, **fields).json()
        assert chat["choices"][0]["message"]["content"] == want.text
        assert chat["usage"]["prompt_tokens"] == len(ids)
    usage = post(served, CHAT, max_tokens=1, add_generation_prompt=False).json()["usage"]
    assert usage["prompt_tokens"] == len(llm.tokenizer.encode_chat(MESSAGES, add_generation_prompt=False))
    silent = {"role": "assistant", "content": None}
    for wrong in (
        {"messages": MESSAGES}, {"add_generation_prompt": True}, {"messages": [*MESSAGES, silent]},
    ):  # fmt: skip
        assert post(served, CHAT, **body | wrong).status_code == 400, wrong


def test_the_form_and_the_errors_of_tools_are_honoured_in_messages(served: Served, llm: LLM) -> None:
    form = {"type": "json_schema", "schema": record(a={"enum": [1]})}
    for field in ({"output_format": form}, {"output_config": {"format": form, "effort": "low"}}):
        reply = post(served, MESSAGE, max_tokens=40, **field).json()
        assert json.loads(reply["content"][0]["text"]) == {"a": 1}
    assert post(served, MESSAGE, messages=[{"role": "user", "content": []}]).is_success

    def tokens(**more: bool) -> int:
        use = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "no", **more}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return int(post(served, MESSAGE, messages=[*MESSAGES, *turns]).json()["usage"]["input_tokens"])

    assert tokens(is_error=True) > tokens()


def test_a_response_repeats_its_request_and_a_cut_call_is_incomplete(client: openai.OpenAI) -> None:
    whole = client.responses.create(max_output_tokens=60, **CALL)
    assert whole.status == "completed" and whole.output[0].type == "function_call" and whole.usage is not None
    assert whole.tool_choice == "required" and whole.parallel_tool_calls is False and whole.top_p == 0.5
    assert whole.metadata == {"a": "b"} and whole.instructions == "call" and whole.max_output_tokens == 60
    assert [tool.name for tool in whole.tools if tool.type == "function"] == ["read"]
    for limit in range(whole.usage.output_tokens - 7, 0, -1):  # cut within the arguments
        cut = client.responses.create(max_output_tokens=limit, **CALL)
        if cut.output[0].type == "function_call" and cut.output[0].arguments[-1:] not in ("", "}"):
            break
    with client.responses.stream(max_output_tokens=limit, **CALL) as stream:
        seen = list(stream)
    assert cut.status == "incomplete" and cut.output[0].status == "incomplete"
    kinds = [event.type for event in seen]
    assert kinds[-1] == "response.incomplete" and "response.function_call_arguments.done" not in kinds
    [done] = [event for event in seen if event.type == "response.output_item.done"]
    assert done.item.status == "incomplete"  # type: ignore[union-attr]


def test_what_no_reply_has_may_be_included_and_truncation_is_honoured(served: Served) -> None:
    assert post(served, RESPONSES, include=["reasoning.encrypted_content"]).is_success
    assert post(served, RESPONSES, input="word " * 700, truncation="auto").is_success


def test_calls_of_the_past_are_told_without_tools(served: Served, llm: LLM) -> None:
    assert llm.tokenizer is not None
    past = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"p": 1}'}}
    messages = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]  # fmt: skip
    call = '<tool_call>\n{"name": "read", "arguments": {"p": 1}}\n</tool_call>'
    result = "<tool_response>\ndone\n</tool_response>"
    told = [*MESSAGES, {"role": "assistant", "content": call}, {"role": "user", "content": result}]
    reply = post(served, CHAT, messages=messages, max_tokens=1).json()
    assert reply["usage"]["prompt_tokens"] == len(llm.tokenizer.encode_chat(told))


READ_LINES = record(path={"enum": ["a.py", "b.py"]}, lines={"type": "integer", "minimum": 1, "maximum": 9})

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "read", "description": "Read a file.", "parameters": READ_LINES},
    },
    {"type": "function", "function": {"name": "stop"}},
]
COMMON: dict[str, Any] = {
    "model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 150, "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "read"}},
}  # fmt: skip


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
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    further = COMMON | {"messages": [*MESSAGES, called, result], "tool_choice": "auto"}
    usages = [client.chat.completions.create(**body).usage for body in (further, COMMON | {"max_tokens": 1})]
    assert usages[0] and usages[1] and usages[0].prompt_tokens > usages[1].prompt_tokens


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
def test_choices_decide_whether_a_text_calls(client: openai.OpenAI, choice: Any) -> None:
    body = {**COMMON, "tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    for found in client.chat.completions.create(**body).choices:
        assert (found.finish_reason == "tool_calls") is (choice == "required")
        assert bool(found.message.tool_calls) is (choice == "required")


def test_a_call_by_the_messages_api(claude: anthropic.Anthropic) -> None:
    common: Any = {
        "model": "demo", "max_tokens": 150, "messages": MESSAGES, "extra_body": {"temperature": 0},
        "tools": [{"name": "read", "input_schema": READ_LINES}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = claude.messages.create(**common)
    assert whole.stop_reason == "tool_use"
    [block] = whole.content
    assert block.type == "tool_use" and block.name == "read" and fits(block.input)
    with claude.messages.stream(**common) as stream:
        final = stream.get_final_message()
    [other] = final.content
    assert other.type == "tool_use" and other.input == block.input and final.stop_reason == "tool_use"
    answer = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "1"}]}
    called = {"role": "assistant", "content": [block.model_dump()]}
    goes_on = {"role": "user", "content": [answer, {"type": "text", "text": "go on"}]}
    common |= {"messages": [*MESSAGES, called, goes_on], "tool_choice": {"type": "auto"}}
    further = claude.messages.create(**common).usage
    assert further.input_tokens + (further.cache_read_input_tokens or 0) > whole.usage.input_tokens


def test_a_call_by_the_responses_api(client: openai.OpenAI) -> None:
    common: Any = {
        "model": "demo", "max_output_tokens": 150, "input": "def f(", "temperature": 0,
        "tools": [{"type": "function", "name": "read", "parameters": READ_LINES, "strict": True}],
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
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "1"}
    items: Any = [*MESSAGES, item.model_dump(), result]
    further = client.responses.create(**{**common, "input": items, "tool_choice": "auto"})
    assert further.usage is not None and whole.usage is not None
    assert further.usage.input_tokens > whole.usage.input_tokens


def test_a_prediction_is_used_and_counted(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}

    def said(**prediction: Any) -> tuple[str, Any]:
        found = client.chat.completions.create(**common, extra_body={"ignore_eos": True}, **prediction)
        assert found.usage is not None
        return found.choices[0].message.content or "", found.usage.completion_tokens_details

    text, plain = said()
    predicted, right = said(prediction={"type": "content", "content": text})
    mistaken, wrong = said(prediction={"type": "content", "content": [{"type": "text", "text": "x" * 300}]})
    assert predicted == mistaken == text
    assert right.accepted_prediction_tokens > 20 and wrong.rejected_prediction_tokens > 0
    assert plain.rejected_prediction_tokens == right.rejected_prediction_tokens == 0


def test_a_request_has_its_policy_and_its_longest_draft(served: Served) -> None:
    body = {"prompt": "import os\n", "max_tokens": 40, "ignore_eos": True, "drafter": "draft-model"}

    def drafting(**own: Any) -> tuple[str, int]:
        found = post(served, TEXT, **body, **own).json()
        drafted = found["metrics"]["speculative_decoding"]["acceptance_histogram"]
        return found["choices"][0]["text"], len(drafted)

    text, longest = drafting()
    assert longest == 5
    assert drafting(max_draft=2) == (text, 2) and drafting(max_draft=8) == (text, 8)
    assert drafting(policy="heuristic", max_draft=3) == (text, 3)


def test_a_request_for_auto_decides_by_measured_costs_though_others_run(served: Served, llm: LLM) -> None:
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
