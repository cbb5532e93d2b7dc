"""Reasoning of served replies, in every shape of the API, whole and streamed, with a form, a tool and stop strings.

The model does not reason: a word of its text stands for the closing marker, the end of its template for the opening.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from foredraft.decode.thinking import ThinkingMarkers, ThinkingReader
from foredraft.llm import LLM
from foredraft.serve import conversation
from foredraft.serve.conversation import ReasoningFormat
from tests.serve.routes import CHAT, MESSAGES, post, record
from tests.support.serving import Served

OPENS = "assistant:"
LENGTH = 48
VARIED: dict[str, Any] = {"repetition_penalty": 1.3}  # lets the model write more than line breaks
SCHEMA = record(a={"enum": ["x", "y"]}, b={"type": "boolean"})
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    [output] = llm.chat(MESSAGES, drafter="none", temperature=0, max_new_tokens=LENGTH, **VARIED)
    return str(output.text)


@pytest.fixture(scope="module")
def closes(text: str) -> str:
    words = [word for word in text.split() if word.isalpha() and 8 < text.index(word) < len(text) // 2]
    return words[0]


@pytest.fixture(autouse=True)
def reasons(closes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FORMS", (ReasoningFormat(OPENS, closes, sign="assistant"),))


def parts(text: str, closes: str, *, cut: bool = True) -> tuple[str, str]:
    reader = ThinkingReader(ThinkingMarkers(OPENS, closes, begun=True))
    found = [*reader.read(text), *reader.end(cut=cut)]
    return tuple("".join(part for kind, part in found if kind == name) for name in ("thinking", "content"))  # type: ignore[return-value]


def reply(served: Served, **fields: Any) -> dict[str, Any]:
    found = post(served, CHAT, **{"max_tokens": LENGTH, **VARIED, **fields})
    assert found.status_code == 200, found.text
    return found.json()  # type: ignore[no-any-return]


def message(served: Served, **fields: Any) -> tuple[str, str]:
    return said(reply(served, **fields))


def said(reply: dict[str, Any]) -> tuple[str, str]:
    found = reply["choices"][0]["message"]
    assert found.get("reasoning") == found.get("reasoning_content")
    return found.get("reasoning", ""), found["content"] or ""


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str]:
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "stream": True}
    found = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(**common, **fields, extra_body=VARIED):
        for name in found:
            found[name] += getattr(chunk.choices[0].delta, name, None) or ""
    return found["reasoning_content"], found["content"]


@pytest.mark.heavy
def test_a_schema_holds_behind_the_reasoning_with_and_without_drafts(
    served: Served, client: openai.OpenAI, text: str, closes: str
) -> None:
    fields: dict[str, Any] = {"response_format": FORM, "max_tokens": 160}
    drafted = reply(served, **fields, drafter="draft-model")
    reasoning, content = message(served, **fields, drafter="none")
    assert (reasoning, content) == said(drafted) == streamed(client, **fields)
    assert text.lstrip("\n").startswith(reasoning) and closes not in reasoning and reasoning
    assert set(json.loads(content)) == {"a", "b"}
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
    for seed in range(2):
        choice = reply(served, **fields, temperature=1, seed=seed)["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")  # it does not end in its reasoning
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a", "b"}


def test_a_required_call_follows_the_reasoning(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FORMS", (ReasoningFormat(OPENS, "#\n#\n#", sign="assistant"),))
    function = {"name": "read", "parameters": record(path={"enum": ["a.py"]})}
    tools = [{"type": "function", "function": function}]
    found = post(served, CHAT, max_tokens=100, tools=tools, tool_choice="required").json()
    said, usage = found["choices"][0]["message"], found["usage"]
    assert not said["content"] and said["tool_calls"][0]["function"]["arguments"] == '{"path": "a.py"}'
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_stop_strings_act_in_the_reasoning_only_if_asked(served: Served, text: str, closes: str) -> None:
    reasoning, content = parts(text, closes)
    early, late = reasoning.split()[-1], content.split()[0]
    assert message(served, stop=[early])[0] == reasoning
    assert message(served, stop=[late]) == (reasoning, content[: content.index(late)])
    stopped = reply(served, stop=[early], stop_in_reasoning=True)["choices"][0]
    assert stopped["stop_reason"] == early and stopped["message"]["content"] == ""
    assert stopped["message"].get("reasoning", "") == text[: text.index(early)].strip("\n")


def test_messages_have_thinking_blocks(claude: anthropic.Anthropic, text: str, closes: str) -> None:
    more = {"temperature": 0} | VARIED
    whole = claude.messages.create(model="demo", max_tokens=LENGTH, messages=MESSAGES, extra_body=more)
    reasoning, content = parts(text, closes)
    first, second = whole.content
    assert first.type == "thinking" and first.thinking == reasoning and first.signature == whole.id
    assert second.type == "text" and second.text == content


def test_responses_have_reasoning_items(client: openai.OpenAI, text: str, closes: str) -> None:
    common: Any = {"model": "demo", "input": MESSAGES, "temperature": 0, "max_output_tokens": LENGTH}
    reasoning, content = parts(text, closes)
    with client.responses.stream(**common, extra_body=VARIED) as stream:
        events = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    reply: Any = events[-1].response  # type: ignore[union-attr]
    item = reply.output[0]
    assert item.type == "reasoning" and item.content[0].text == reasoning == deltas
    assert reply.output_text == content and reply.usage.output_tokens_details.reasoning_tokens > 0


def test_variables_that_the_template_does_not_read_are_named(served: Served) -> None:
    unread = {"enable_thinking": False}
    found = post(served, CHAT, chat_template_kwargs=unread, reasoning_effort="low", **unread)
    assert found.status_code == 200
    assert found.headers["x-ignored-fields"] == "chat_template_kwargs.enable_thinking, enable_thinking"
    for wrong in ({"tokenize": False}, {"messages": []}, {"continue_final_message": True}):
        refused = post(served, CHAT, chat_template_kwargs=wrong)
        assert refused.status_code == 400 and min(wrong) in refused.json()["error"]["message"]


def test_special_tokens_within_a_marker_are_shown(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = llm.loaded.tokenizer
    id, token = next((id, tokenizer.inner.id_to_token(id)) for id in sorted(tokenizer.special))
    monkeypatch.setattr(conversation, "FORMS", (ReasoningFormat(OPENS, f"{token}!", sign="assistant"),))
    bias: dict[str, Any] = {"max_tokens": 3, "logit_bias": {str(id): 100}, "ignore_eos": True}
    assert message(served, **bias)[0].startswith(token)
    monkeypatch.setattr(conversation, "FORMS", (ReasoningFormat(OPENS, "!", sign="assistant"),))
    assert message(served, **bias) == ("", "")
