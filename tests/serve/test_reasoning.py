"""Reasoning of served replies, in every shape of the API, whole and streamed, with a form, a tool and stop strings.

The model was trained on code and does not reason. So a word that it writes by itself stands for the closing
marker, and the end of its chat template for the opening one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from foredraft.decode.thinking import Thinking, ThinkingReader
from foredraft.llm import LLM
from foredraft.serve import thinking
from foredraft.serve.thinking import Form
from tests.support.serving import Served

MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
CHAT = "/v1/chat/completions"
OPENS = "assistant:"
LENGTH = 48
VARIED: dict[str, Any] = {"repetition_penalty": 1.3}  # lets the model write more than line breaks
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
READ = {"type": "object", "properties": {"path": {"enum": ["a.py"]}}, "required": ["path"], "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """What the model says without any reasoning."""
    [output] = llm.chat(MESSAGES, drafter="none", temperature=0, max_new_tokens=LENGTH, **VARIED)
    return str(output.text)


@pytest.fixture(scope="module")
def closes(text: str) -> str:
    """A word in the middle of it."""
    words = [word for word in text.split() if word.isalpha() and 8 < text.index(word) < len(text) // 2]
    return words[0]


@pytest.fixture(autouse=True)
def reasons(closes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server take the model for one that reasons."""
    monkeypatch.setattr(thinking, "FORMS", (Form(OPENS, closes, sign="assistant"),))


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def parts(text: str, closes: str, *, cut: bool = True) -> tuple[str, str]:
    reader = ThinkingReader(Thinking(OPENS, closes, begun=True))
    found = [*reader.read(text), *reader.end(cut=cut)]
    return tuple("".join(part for kind, part in found if kind == name) for name in ("thinking", "content"))  # type: ignore[return-value]


def post(served: Served, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": LENGTH} | VARIED | fields
    reply = served.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def message(served: Served, **fields: Any) -> tuple[str, str]:
    found = post(served, **fields)["choices"][0]["message"]
    assert found.get("reasoning") == found.get("reasoning_content")
    return found.get("reasoning", ""), found["content"] or ""


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, int]:
    common: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": LENGTH,
        "extra_body": VARIED,
    } | fields
    found, tokens = {"reasoning_content": "", "content": ""}, 0
    for chunk in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **common
    ):
        for choice in chunk.choices:
            for name in found:
                found[name] += getattr(choice.delta, name, None) or ""
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            tokens = chunk.usage.completion_tokens_details.reasoning_tokens or 0
    return found["reasoning_content"], found["content"], tokens


def test_streams_and_whole_replies_agree_at_every_limit(
    served: Served, client: openai.OpenAI, llm: LLM, text: str, closes: str
) -> None:
    ids = llm.encode(text)[0]
    thought = set()
    for limit in range(1, len(ids) + 1, 3):
        [plain] = llm.chat(MESSAGES, drafter="none", temperature=0, max_new_tokens=limit, **VARIED)
        want = parts(str(plain.text), closes)
        whole = post(served, max_tokens=limit)
        found = whole["choices"][0]["message"]
        assert (found.get("reasoning", ""), found["content"]) == want
        details = whole["usage"]["completion_tokens_details"]
        assert streamed(client, max_tokens=limit) == (*want, details["reasoning_tokens"])
        count = next(
            (n for n in range(len(plain.pieces or ()) + 1) if closes in "".join((plain.pieces or ())[:n])),
            limit,
        )
        assert details["reasoning_tokens"] == count
        thought.add(bool(want[1]))
    assert thought == {True, False}, "no limit lies in each part"
    assert served.idle()


def test_a_schema_holds_behind_the_reasoning_with_and_without_drafts(
    served: Served, client: openai.OpenAI, text: str, closes: str
) -> None:
    fields: dict[str, Any] = {"response_format": FORM, "max_tokens": 160}
    found = [message(served, **fields, drafter=drafter) for drafter in ("none", "draft-model", "lookup")]
    assert found[0] == found[1] == found[2] == streamed(client, **fields)[:2]
    reasoning, content = found[0]
    assert text.lstrip("\n").startswith(reasoning) and closes not in reasoning and reasoning
    assert set(json.loads(content)) == {"a", "b"}
    drafted = post(served, **fields, drafter="draft-model")["metrics"]["speculative_decoding"]
    assert drafted["num_accepted_tokens"] > 0
    for seed in range(3):
        choice = post(served, **fields, temperature=1, seed=seed)["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")  # it does not end in its reasoning
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a", "b"}


def test_a_required_call_follows_the_reasoning(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinking, "FORMS", (Form(OPENS, "#\n#\n#", sign="assistant"),))
    tool: Any = {"type": "function", "function": {"name": "read", "parameters": READ}}
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "tools": [tool], "tool_choice": "required"}  # fmt: skip
    reply = client.chat.completions.create(max_tokens=100, **common)
    message = reply.choices[0].message
    assert message.tool_calls is not None and not message.content
    assert message.tool_calls[0].function.arguments == '{"path": "a.py"}'  # type: ignore[union-attr]
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert 0 < (reply.usage.completion_tokens_details.reasoning_tokens or 0) < reply.usage.completion_tokens


def test_stop_strings_act_in_the_reasoning_only_where_that_is_asked(
    served: Served, text: str, closes: str
) -> None:
    reasoning, content = parts(text, closes)
    early, late = reasoning.split()[-1], content.split()[0]
    assert message(served, stop=[early])[0] == reasoning
    assert message(served, stop=[late]) == (reasoning, content[: content.index(late)])
    stopped = post(served, stop=[early], stop_in_reasoning=True)["choices"][0]
    assert stopped["stop_reason"] == early and stopped["message"]["content"] == ""
    assert stopped["message"].get("reasoning", "") == text[: text.index(early)].strip("\n")


def test_messages_have_thinking_blocks(claude: anthropic.Anthropic, text: str, closes: str) -> None:
    common: dict[str, Any] = {"model": "demo", "max_tokens": LENGTH, "messages": MESSAGES, "extra_body": {"temperature": 0} | VARIED}  # fmt: skip
    reasoning, content = parts(text, closes)
    whole = claude.messages.create(**common)
    with claude.messages.stream(**common) as stream:
        final = stream.get_final_message()
    for reply in (whole, final):
        first, second = reply.content
        assert first.type == "thinking" and first.thinking == reasoning and first.signature == reply.id
        assert second.type == "text" and second.text == content


def test_responses_have_reasoning_items(client: openai.OpenAI, text: str, closes: str) -> None:
    common: dict[str, Any] = {
        "model": "demo",
        "input": MESSAGES,
        "temperature": 0,
        "max_output_tokens": LENGTH,
        "extra_body": VARIED,
    }
    reasoning, content = parts(text, closes)
    whole = client.responses.create(**common)
    with client.responses.stream(**common) as stream:
        events = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert deltas == reasoning
    for reply in (whole, events[-1].response):  # type: ignore[union-attr]
        item = reply.output[0]
        assert item.type == "reasoning" and item.content is not None and item.content[0].text == reasoning
        assert reply.output_text == content
        assert reply.usage is not None and reply.usage.output_tokens_details.reasoning_tokens > 0


def test_variables_that_the_template_does_not_read_are_named(served: Served, client: openai.OpenAI) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1}
    fields = {
        "chat_template_kwargs": {"enable_thinking": False},
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    reply = served.client.post(CHAT, json=body | fields)
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "chat_template_kwargs.enable_thinking, enable_thinking"
    for wrong in ({"tokenize": False}, {"messages": []}, {"continue_final_message": True}):
        refused = served.client.post(CHAT, json=body | {"chat_template_kwargs": wrong})
        assert refused.status_code == 400 and min(wrong) in refused.json()["error"]["message"]


def test_a_begun_reply_reasons_no_more(served: Served, text: str) -> None:
    begun = {"role": "assistant", "content": "x = 1"}
    fields = {"messages": [*MESSAGES, begun], "continue_final_message": True}
    assert message(served, **fields)[0] == ""
