"""A reply of any shape, cut at any token, is the history of the next turn; and what agents' requests bring along."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.model.chat import ChatTemplate
from foredraft.serve import conversation
from foredraft.serve.conversation import ReasoningFormat
from tests.serve.routes import CHAT, MESSAGE, MESSAGES, RESPONSES, joined, post
from tests.support.serving import TEMPLATE, Served, events_of

SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 4}}, "required": ["path"]}
FUNCTION: dict[str, Any] = {"name": "read", "parameters": SCHEMA}
# As Qwen's templates tell calls; of a call's arguments they read an object.
CALLS = "{% for m in messages %}# {{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}\n{% endfor %}{{ tools | tojson if tools else '' }}# assistant:"  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    MESSAGE: {"tools": [{"name": "read", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}
LIMITS = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGE: "max_tokens"}
ASK = {"role": "user", "content": "def add(a, b):"}
LONGEST = 26  # tokens of a call and a little more


def result_of(call_id: str, path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"role": "tool", "tool_call_id": call_id, "content": "no JSON"}
    if path == RESPONSES:
        return {"type": "function_call_output", "call_id": call_id, "output": "no JSON"}
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "no JSON"}],
    }


def turns(path: str, reply: dict[str, Any]) -> list[Any]:
    """Return the reply as clients send it back, and results of its calls."""
    if path == CHAT:
        said = reply["choices"][0]["message"]
        return [said, *(result_of(call["id"], path) for call in said.get("tool_calls") or ())]
    if path == RESPONSES:
        calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
        return [*reply["output"], *(result_of(id, path) for id in calls)]
    said = {name: reply[name] for name in ("role", "content")}
    return [said, *(result_of(part["id"], path) for part in said["content"] if part["type"] == "tool_use")]


def streamed(path: str, text: str) -> dict[str, Any]:
    """Return the reply that the events of a stream make."""
    events = events_of(text)
    if path == CHAT:
        delta = joined(choice["delta"] for event in events for choice in event["choices"])
        calls: dict[int, Any] = {}
        for part in delta.pop("tool_calls", None) or ():
            calls.setdefault(part["index"], []).append({key: part[key] for key in part if key != "index"})
        message = {**delta, "tool_calls": [joined(parts) for parts in calls.values()]}
        return {"choices": [{"message": message}]}
    if path == RESPONSES:
        return events[-1]["response"]  # type: ignore[no-any-return]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
            if name is not None:
                block[name] += delta[name]
    return {"role": "assistant", "content": blocks}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["calls", "text", "reasoning"])
@pytest.mark.parametrize("template", [TEMPLATE, CALLS], ids=["plain", "native"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGE])
def test_a_reply_that_a_limit_cut_is_history_like_any_other(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, template: str, kind: str, stream: bool
) -> None:  # fmt: skip
    monkeypatch.setattr(llm.tokenizer, "chat", ChatTemplate({"default": template}))
    if kind == "reasoning":
        monkeypatch.setattr(
            conversation, "FORMS", (ReasoningFormat("assistant:", "return", sign="assistant"),)
        )
    asked = TOOLS[path] if kind == "calls" else {}
    field = "input" if path == RESPONSES else "messages"
    cut = 0
    for limit in range(1, LONGEST):
        given = {field: [ASK], LIMITS[path]: limit, **asked}
        reply = post(served, path, **given, stream=stream)
        assert reply.status_code == 200, reply.text
        made = streamed(path, reply.text) if stream else reply.json()
        history = [ASK, *turns(path, made)]
        cut += "no JSON" in str(history)
        for more in ([], [{"role": "user", "content": "go on"}]):
            body = {field: [*history, *more], LIMITS[path]: 1}
            follows = post(served, path, **body, **({} if kind == "text" else TOOLS[path]))
            assert follows.status_code == 200, (limit, history, follows.text)
    assert bool(cut) == (kind == "calls")


def test_a_tool_without_parameters_is_shown_with_none(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = "{'type': 'object', 'properties': {}}"
    shown = "{% if tools and tools[0].function.name == 'read' and tools[0].function.parameters != " + same
    shown += " %}{{ raise_exception('none') }}{% endif %}" + CALLS
    monkeypatch.setattr(llm.tokenizer, "chat", ChatTemplate({"default": shown}))
    without: list[dict[str, Any]] = [{}, {"parameters": None}, {"parameters": {}}]
    for none in without:
        tools = [{"type": "function", "function": {"name": "read", **none}}]
        assert post(served, CHAT, tools=tools).status_code == 200


def test_a_block_that_changes_with_each_request_is_no_part_of_the_prompt(served: Served) -> None:
    rules = " ".join(f"rule_{i} = {i}" for i in range(20))

    def read(*blocks: str) -> int:
        system = [{"type": "text", "text": text} for text in blocks]
        reply = post(served, MESSAGE, messages=MESSAGES, max_tokens=1, system=system)
        usage = reply.json()["usage"]
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])

    header = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    assert read(header.format("ea6aa"), rules) == read(header.format("0"), rules) == read(rules)
    assert read(header.format("0")) == read()
    assert read(f"A text names {header}") > read()
