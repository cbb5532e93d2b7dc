"""Reasoning of replies: which markers a model has, and the shapes of the API that show it, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.params import SamplingParams
from foredraft.decode.stats import Stats
from foredraft.decode.thinking import Thinking
from foredraft.llm.output import Output, Piece
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.completions import ChatReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Event, Reply, Sample
from foredraft.serve.requests import Job
from foredraft.serve.responses import ResponseReply
from foredraft.serve.thinking import template_variables, thinking_after
from foredraft.serve.token_texts import TokenTexts
from foredraft.serve.tools import Tool, Tools
from tests.support.checkpoints import tiny_tokenizer
from tests.support.planting import assert_caught, defect

# What templates of published models say of reasoning.
HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
QWEN = HEAD + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
R1 = HEAD + "<think>\n{% endif %}{# content.split('</think>')[-1] #}"
V3 = HEAD + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
GRANITE = "{% if thinking %}Write your thoughts between <think></think> and your response between <response></response>.{% endif %}" + HEAD + "{% endif %}"  # fmt: skip
OLDER = "{% if thinking %}Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'.{% endif %}" + HEAD + "{% endif %}"  # fmt: skip
EFFORT = HEAD + "{{ reasoning_effort }}{% endif %}"
PLAIN = HEAD + "{% endif %}"
USER = {"role": "user", "content": "What is </think>?"}


def tokenizer(template: str | None, *, added: tuple[str, ...] = ()) -> Tokenizer:
    inner = tiny_tokenizer()
    inner.add_tokens(list(added))
    return Tokenizer(inner, None if template is None else ChatTemplate({"default": template}))


@pytest.mark.parametrize(
    ("template", "variables", "want"),
    [
        (QWEN, {}, Thinking("<think>", "</think>")),
        (QWEN, {"enable_thinking": False}, None),
        (R1, {}, Thinking("<think>", "</think>", begun=True)),
        (V3, {"thinking": True}, Thinking("<think>", "</think>", begun=True)),
        (V3, {"thinking": False}, None),
        (GRANITE, {"thinking": True}, Thinking("<think>", "</think>", answer=("<response>", "</response>"))),
        (OLDER, {"thinking": True}, Thinking("Here is my thought process:", "Here is my response:")),
        (PLAIN, {}, None),
    ],
)
def test_the_markers_and_the_begin_of_the_thinking_are_those_of_the_template(
    template: str, variables: dict[str, Any], want: Thinking | None
) -> None:
    made = tokenizer(template)
    assert thinking_after(made, made.chat_text([USER], **variables)) == want


def test_a_vocabulary_shows_markers_where_the_template_does_not() -> None:
    made = tokenizer(PLAIN, added=("<think>", "</think>"))
    assert thinking_after(made, made.chat_text([USER])) == Thinking("<think>", "</think>")
    made = tokenizer(PLAIN, added=("[THINK]", "[/THINK]"))
    assert thinking_after(made, made.chat_text([USER]), stops=True) == Thinking(
        "[THINK]", "[/THINK]", stops=True
    )


@pytest.mark.parametrize(
    ("begun", "want"),
    [
        ("<think>\nhm", Thinking("<think>", "</think>", begun=True)),
        ("<think>\nhm\n</think>\n\nYes", None),
        ("Yes, ", None),
        ("", Thinking("<think>", "</think>")),
    ],
)
def test_a_begun_reply_goes_on_where_it_stands(begun: str, want: Thinking | None) -> None:
    made = tokenizer(QWEN)
    messages = [USER, {"role": "assistant", "content": begun}]
    prompt = made.chat_text(messages, continue_final_message=True)
    assert thinking_after(made, prompt, begun) == want


@pytest.mark.parametrize(
    ("template", "given", "variables", "ignored"),
    [
        (QWEN, {"thinks": False}, {"enable_thinking": False}, []),
        (V3, {"thinks": True}, {"thinking": True}, []),
        (PLAIN, {"thinks": False}, {}, ["enable_thinking"]),
        (QWEN, {"effort": "none"}, {"enable_thinking": False}, []),
        (QWEN, {"effort": "none", "thinks": True}, {"enable_thinking": True}, []),
        (QWEN, {"effort": "high"}, {}, []),
        (EFFORT, {"effort": "high"}, {"reasoning_effort": "high"}, []),
        (EFFORT, {"effort": "high", "given": {"reasoning_effort": "low"}}, {"reasoning_effort": "low"}, []),
        (QWEN, {"thinks": True, "given": {"enable_thinking": False}}, {"enable_thinking": False}, []),
        (PLAIN, {"given": {"enable_thinking": False, "bos_token": "x"}}, {"bos_token": "x"}, ["chat_template_kwargs.enable_thinking"]),
        (PLAIN, {"given": {"tokenize": True}}, {"tokenize": True}, []),  # which the template's rendering refuses
    ],
)  # fmt: skip
def test_a_template_gets_the_variables_that_it_reads(
    template: str, given: dict[str, Any], variables: dict[str, Any], ignored: list[str]
) -> None:
    asked = {"given": {}, "effort": None, "thinks": None, "with_tools": False} | given
    chat = ChatTemplate({"default": template})
    assert template_variables(chat, asked.pop("given"), **asked) == (variables, ignored)


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
THOUGHT = "I see.\n\nIt <is> so."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nOne file.\n{CALL}"
THINK = Thinking("<think>", "</think>")


def tools() -> Tools | None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "read"}})
    return Tools.of([tool], None, None, ChatTemplate({"default": ""}))


def generation(text: str, size: int, reason: str, *, calls: bool) -> Any:
    """A generation whose text comes in tokens of `size` characters."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    output = Output(
        text=text, token_ids=[1] * len(parts), origins=["target"] * len(parts), finish_reason=reason, seed=0,
        sample=0, prompt_tokens=1, stats=Stats(), pieces=parts,
    )  # fmt: skip

    async def pieces(heartbeat: float | None = None) -> AsyncIterator[list[tuple[int, Piece]]]:
        for index, part in enumerate(parts):
            yield [(0, Piece(part, [1], ["target"], parts=[(index, part)]))]
        yield [(0, Piece("", [], [], parts=[], output=output))]

    job = Job([[5]], SamplingParams(), n=1, tools=tools() if calls else None, thinking=THINK)
    return SimpleNamespace(job=job, prompt_tokens=1, pieces=pieces)


def streamed(shape: type[Reply], given: Any) -> tuple[list[Event], Sample]:
    reply = shape("id", "demo", {}, given, TokenTexts(None, 0))

    async def collect() -> list[Event]:
        return [event async for event in reply.events(None) if event is not None]

    return asyncio.run(collect()), reply.samples[0]


def whole(shape: type[Reply], given: Any) -> tuple[Event, Sample]:
    reply = shape("id", "demo", {}, given, TokenTexts(None, 0))
    asyncio.run(reply.finish())
    return reply.whole(), reply.samples[0]


def of_chat(events: list[Event]) -> dict[str, Any]:
    """Join the chunks of a stream to a message."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "calls": ""}
    for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
        for name in ("content", "reasoning_content", "reasoning"):
            found[name] += delta.get(name, "")
        found["calls"] += "".join(part["function"]["arguments"] for part in delta.get("tool_calls", ()))
    return found


def of_message(message: dict[str, Any]) -> dict[str, Any]:
    calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content", "reasoning")}
    return {**texts, "calls": calls}


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("calls", [True, False], ids=["tools", "no tools"])
def test_a_chat_has_its_reasoning_beside_its_content(size: int, calls: bool) -> None:
    events, sample = streamed(ChatReply, generation(TEXT, size, "eos", calls=calls))
    found = of_chat(events)
    reply, other = whole(ChatReply, generation(TEXT, size, "eos", calls=calls))
    assert found == of_message(reply["choices"][0]["message"])
    assert found["reasoning_content"] == found["reasoning"] == THOUGHT
    assert found["content"] == ("One file." if calls else f"One file.\n{CALL}")
    assert found["calls"] == ('{"path": "a"}' if calls else "")
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    closed = TEXT.index("</think>") + len("</think>")
    assert sample.reasoning_tokens == other.reasoning_tokens == -(-closed // size)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == sample.reasoning_tokens


def check_every_limit() -> None:
    for end in range(len(TEXT) + 1):
        cut = TEXT[:end]
        events, sample = streamed(ChatReply, generation(cut, 1, "length", calls=False))
        reply, other = whole(ChatReply, generation(cut, 1, "length", calls=False))
        found = of_chat(events)
        assert found == of_message(reply["choices"][0]["message"])
        assert THOUGHT.startswith(found["reasoning"]) and f"One file.\n{CALL}".startswith(found["content"])
        closed = TEXT.index("</think>") + len("</think>")
        thinks = end >= len("<think>")
        assert sample.reasoning_tokens == other.reasoning_tokens == (min(end, closed) if thinks else 0)


def test_a_stream_s_pieces_are_the_whole_reply_at_every_limit() -> None:
    check_every_limit()


@pytest.mark.parametrize("end", range(0, len(TEXT) + 1, 5))
@pytest.mark.parametrize("shape", [MessageReply, ResponseReply])
def test_blocks_of_a_stream_are_those_of_the_whole_reply_at_every_limit(shape: type[Reply], end: int) -> None:
    events, _ = streamed(shape, generation(TEXT[:end], 1, "length", calls=True))
    reply, _ = whole(shape, generation(TEXT[:end], 1, "length", calls=True))
    if shape is ResponseReply:
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for item in [*done, *reply["output"]]:
            item.pop("call_id", None), item.pop("id")
        assert done == reply["output"]
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] <= reply["usage"]["output_tokens"]
        return
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({"type": event["content_block"]["type"], "text": "", "signature": None})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["signature"] = delta.get("signature", blocks[-1]["signature"])
            blocks[-1]["text"] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
    assert [block["type"] for block in blocks] == [block["type"] for block in reply["content"]]
    for block, shown in zip(blocks, reply["content"], strict=True):
        assert block["signature"] == shown.get("signature")
        if shown["type"] != "tool_use":
            assert block["text"] == shown.get("text", shown.get("thinking"))


def test_a_response_shows_reasoning_by_its_own_events() -> None:
    events, sample = streamed(ResponseReply, generation(TEXT, 4, "eos", calls=False))
    thought = [event for event in events if event.get("output_index") == 0]
    assert thought[0]["item"]["type"] == "reasoning" and thought[0]["item"]["summary"] == []
    assert thought[1]["part"] == {"type": "reasoning_text", "text": ""}
    deltas = [event["delta"] for event in thought if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    assert [event["type"] for event in thought[-3:]] == [
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert thought[-1]["item"]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == sample.reasoning_tokens > 0


def test_a_message_shows_reasoning_as_a_thinking_block() -> None:
    reply, _ = whole(MessageReply, generation(TEXT, 4, "eos", calls=False))
    assert reply["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": "id"},
        {"type": "text", "text": f"One file.\n{CALL}"},
    ]


def test_a_reply_without_reasoning_has_no_sign_of_it() -> None:
    reply, sample = whole(ChatReply, generation("Yes.", 1, "eos", calls=False))
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert sample.reasoning_tokens == 0
    events, _ = streamed(MessageReply, generation("Yes.", 1, "eos", calls=False))
    assert all(event.get("content_block", {}).get("type") != "thinking" for event in events)


def test_a_marker_s_last_token_counted_as_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    early = defect(
        "one token too few", Sample.reasoning_tokens, lambda sound: lambda sample: max(0, sound(sample) - 1),
        check_every_limit,
    )  # fmt: skip
    assert_caught(early, monkeypatch)


def test_the_effort_of_a_response_is_that_of_its_chat() -> None:
    body = {"model": "demo", "input": "hi", "reasoning": {"effort": "none", "summary": "auto"}}
    assert ResponseReply.read(body).reasoning_effort == "none"  # type: ignore[union-attr]
    assert ResponseReply.read({"model": "demo", "input": "hi"}).reasoning_effort is None  # type: ignore[union-attr]
