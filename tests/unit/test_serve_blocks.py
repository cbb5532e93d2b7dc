"""Replies with reasoning, text and several calls: each shape of the API, streamed and whole, cut anywhere; the reader
of calls, and the grammar that calls are constrained by."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("fastapi")

import foredraft
from foredraft.constraints.grammar import Grammars
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.call_formats import HERMES, LLAMA, MISTRAL, CallFormat
from foredraft.serve.calls import CallReader
from foredraft.serve.completions import ChatReply
from foredraft.serve.messages import MessageReply
from foredraft.serve.replies import Event, Reply, Sample
from foredraft.serve.responses import ResponseReply
from foredraft.serve.tools import NamedChoice, Tool, Tools
from tests.support.checkpoints import tiny_tokenizer
from tests.support.mutation import assert_caught, defect
from tests.support.replies import CALL, Written

THOUGHT = "I see.\n\nIt <is> so."
ANSWER = f"Two files.\n{CALL % 'a'}\n{CALL % 'b'}\nDone."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CLOSED = TEXT.index("</think>") + len("</think>")
CALLS = ['{"path": "a"}', '{"path": "b"}']
SIZES = pytest.mark.parametrize("size", [1, 3, 7, 1000])


def chat_of(events: list[Event]) -> dict[str, Any]:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    names = ("content", "reasoning_content", "reasoning")
    found: dict[str, Any] = {name: "".join(delta.get(name, "") for delta in deltas) for name in names}
    calls: list[str] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            assert (part["index"], part["function"]["name"]) == (len(calls), "read")
            calls.append("")
        calls[part["index"]] += part["function"]["arguments"]
    return {**found, "calls": calls}


def blocks_of(events: list[Event]) -> list[tuple[str, str, str | None]]:
    """Return type, text and signature of a message's blocks, which follow each other."""
    open_, blocks = None, list[list[Any]]()
    for event in events:
        if event["type"] == "content_block_start":
            assert open_ is None and event["index"] == len(blocks)
            open_ = event["index"]
            blocks.append([event["content_block"]["type"], "", None])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_
            delta = event["delta"]
            blocks[-1][1] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
            blocks[-1][2] = delta.get("signature", blocks[-1][2])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_
            open_ = None
    assert open_ is None
    return [(kind, text, signature) for kind, text, signature in blocks]


def items_of(events: list[Event]) -> list[dict[str, Any]]:
    open_, done = None, list[dict[str, Any]]()
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_ is None
            open_ = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert event["output_index"] == open_ == len(done)
            open_ = None
            done.append(event["item"])
        elif "output_index" in event:
            assert event["output_index"] == open_
    assert events[-1]["response"]["output"] == done
    return done


@SIZES
@pytest.mark.parametrize("calls", [True, False], ids=["tools", "no tools"])
def test_a_chat_has_reasoning_text_and_calls_in_chunks(size: int, calls: bool) -> None:
    events, _ = Written(TEXT, size, calls=calls).streamed(ChatReply)
    found, last = chat_of(events), events[-1]["choices"][0]
    assert found["reasoning_content"] == found["reasoning"] == THOUGHT
    assert found["content"] == ("Two files.Done." if calls else ANSWER)
    assert found["calls"] == (CALLS if calls else [])
    assert last["delta"] == {} and last["finish_reason"] == ("tool_calls" if calls else "stop")
    check_chat(Written(TEXT, size, calls=calls), -(-CLOSED // size))


@SIZES
def test_blocks_of_a_message_follow_each_other(size: int) -> None:
    events, _ = Written(TEXT, size).streamed(MessageReply)
    assert blocks_of(events) == [
        ("thinking", THOUGHT, "id"),
        ("text", "Two files.", None),
        *(("tool_use", arguments, None) for arguments in CALLS),
        ("text", "Done.", None),
    ]
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert len({block["id"] for block in started if block["type"] == "tool_use"}) == 2


@SIZES
def test_items_of_a_response_follow_each_other(size: int) -> None:
    events, sample = Written(TEXT, size).streamed(ResponseReply)
    thought, *others = items_of(events)
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}] and thought["summary"] == []
    assert [item["type"] for item in others] == ["message", "function_call", "function_call", "message"]
    assert [item["arguments"] for item in others[1:3]] == CALLS
    own = [event for event in events if event.get("output_index") == 0]
    assert own[0]["item"]["type"] == "reasoning" and own[1]["part"] == {"type": "reasoning_text", "text": ""}
    deltas = [event["delta"] for event in own if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    ends = ["response.reasoning_text.done", "response.content_part.done", "response.output_item.done"]
    assert [event["type"] for event in own[-3:]] == ends
    assert events[-1]["type"] == "response.completed"
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == sample.reasoning_tokens > 0


@pytest.mark.parametrize("shape", [MessageReply, ResponseReply])
def test_an_empty_reply_has_one_empty_block(shape: type[Reply]) -> None:
    names = [event["type"] for event in Written("", 1).streamed(shape)[0]]
    assert sum(name in ("content_block_start", "response.output_item.added") for name in names) == 1
    assert ("ping" in names) is not shape.begins_late, (
        "silence before the first event of a message is a comment"
    )


def check_chat(written: Written, thought: int) -> None:
    """Compare the chunks of a chat with the whole one, and its reasoning tokens with so many."""
    (events, sample), (reply, other) = written.streamed(ChatReply), written.whole(ChatReply)
    found, message = chat_of(events), reply["choices"][0]["message"]
    for name in ("content", "reasoning_content", "reasoning"):
        assert found[name] == (message.get(name) or "")
    assert found["calls"] == [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    assert THOUGHT.startswith(found["reasoning"])
    assert sample.reasoning_tokens == other.reasoning_tokens == thought
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought


def check_limit(end: int) -> None:
    """Compare streams with whole replies where a limit cuts the text; each character is a token."""
    cut = Written(TEXT[:end], 1, "length")
    check_chat(cut, min(end, CLOSED) if end >= len("<think>") else 0)
    (events, _), (message, _) = cut.streamed(MessageReply), cut.whole(MessageReply)
    for (kind, text, signature), block in zip(blocks_of(events), message["content"], strict=True):
        assert (kind, signature) == (block["type"], block.get("signature"))
        if end == len(TEXT) or kind != "tool_use":
            assert text == block.get("text", block.get("thinking", json.dumps(block.get("input"))))
    (events, _), (response, _) = cut.streamed(ResponseReply), cut.whole(ResponseReply)
    items = items_of(events)
    for item in [*items, *response["output"]]:
        item.pop("call_id", None), item.pop("id")
    assert items == response["output"]
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


@pytest.mark.heavy
def test_streams_are_the_whole_replies_at_every_limit() -> None:
    for end in range(len(TEXT) + 1):
        check_limit(end)


def test_a_reply_without_reasoning_has_no_sign_of_it() -> None:
    yes = Written("Yes.", 1)
    reply, sample = yes.whole(ChatReply)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert sample.reasoning_tokens == 0
    assert [kind for kind, *_ in blocks_of(yes.streamed(MessageReply)[0])] == ["text"]


def test_a_marker_s_last_token_counted_as_content_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    early = lambda sound: lambda sample: max(0, sound(sample) - 1)  # noqa: E731
    check = lambda: check_limit(len(TEXT))  # noqa: E731
    assert_caught(defect("one token too few", Sample.reasoning_tokens, early, check), monkeypatch)


ARGUMENTS = '{"path": "a}\\"b", "n": [1, {"x": "]"}]}'
Found = tuple[str, list[tuple[str, str]]]
CASES: list[tuple[CallFormat, str, Found]] = [
    (HERMES, "hello", ("hello", [])),
    (HERMES, "x <tool_cal y ", ("x <tool_cal y ", [])),
    (
        HERMES, f'Sure.\n<tool_call>\n{{"name": "read", "arguments": {ARGUMENTS}}}\n</tool_call>\n',
        ("Sure.", [("read", ARGUMENTS)]),
    ),
    (
        HERMES, '<tool_call>{"name":"read","arguments":{}}</tool_call>\n<tool_call>\n{"name": "write", "arguments": {"a": 1} }\n</tool_call>',
        ("", [("read", "{}"), ("write", '{"a": 1}')]),
    ),
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "read"}\n</tool_call>', ("", [("read", '{"a": 1}')])),
    (HERMES, '<tool_call>\n{"name": "read", "arguments": "{\\"a\\": 1}"}\n</tool_call>', ("", [("read", '{"a": 1}')])),
    (HERMES, '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call> x', ('<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call> x', [])),
    (HERMES, '<tool_call>\n{"name": "read", "arguments": {"a": 1', ("", [("read", '{"a": 1')])),
    (HERMES, "<tool_call>\nbad", ("<tool_call>\nbad", [])),
    (HERMES, '<tool_call>{"name":"read","arguments":{}}</tool_call> and then', ("and then", [("read", "{}")])),
    (LLAMA, f'{{"name": "read", "parameters": {ARGUMENTS}}}', ("", [("read", ARGUMENTS)])),
    (LLAMA, '{"name": "read", "parameters": {}}; {"name": "write", "parameters": {"a": 1}}', ("", [("read", "{}"), ("write", '{"a": 1}')])),
    (LLAMA, '{"answer": 5, "x": {}}', ('{"answer": 5, "x": {}}', [])),
    (LLAMA, '  text {"name": 1}', ('  text {"name": 1}', [])),
    (LLAMA, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    (LLAMA, '{"na', ('{"na', [])),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "read", "arguments": {ARGUMENTS}}}, {{"name": "write", "arguments": {{}}}}]', ("", [("read", ARGUMENTS), ("write", "{}")])),
    (MISTRAL, '[TOOL_CALLS][{"name": "read", "arguments": {"a": 1}, "id": "9aBcDeFgH"}, {"name": "write", "arguments": {} , "id": "1"}]', ("", [("read", '{"a": 1}'), ("write", "{}")])),
    (MISTRAL, "[1, 2]", ("[1, 2]", [])),
    (MISTRAL, "[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", [])),
    (MISTRAL, '[TOOL_CALLS] [{"a": 1}]', ('[TOOL_CALLS] [{"a": 1}]', [])),
    (HERMES, "", ("", [])),
]  # fmt: skip


def read(
    format: CallFormat, text: str, cuts: list[int], most: int | None = None, *, cut: bool = False
) -> Found:
    """Return content and calls of a text in pieces, as the events tell them."""
    reader = CallReader(format, {"read": {}, "write": {}}, most)
    events = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += reader.read(text[start:stop])
    events += reader.end(cut=cut)
    content, calls = "", list[list[str]]()
    for call, more in events:
        if call is None:
            content += more
            continue
        if call.index == len(calls):
            calls.append([call.name, ""])
        calls[call.index][1] += more
    told = [(name, arguments) for name, arguments in calls]
    assert told == [(call.name, call.arguments) for call in reader.calls]
    return content, told


@pytest.mark.parametrize(("format", "text", "found"), CASES, ids=str)
def test_every_cut_gives_the_same_calls(format: CallFormat, text: str, found: Found) -> None:
    assert read(format, text, []) == found
    assert read(format, text, list(range(1, len(text)))) == found
    for at in range(len(text)):
        assert read(format, text, [at]) == found


@pytest.mark.parametrize(
    ("format", "text", "found"), [case for case in CASES if case[2][1] and "tool" not in case[2][0]], ids=str
)
def test_a_limit_leaves_no_markup_in_the_content(format: CallFormat, text: str, found: Found) -> None:
    """At every cut point: content is a beginning of the content, and calls of the calls."""
    for at in range(len(text) + 1):
        content, calls = whole = read(format, text[:at], [], cut=True)
        assert whole == read(format, text[:at], list(range(1, at)), cut=True), "in pieces as at once"
        assert found[0].startswith(content.rstrip()), (text[:at], content)
        assert len(calls) <= len(found[1])
        for (name, arguments), (own, all_of_them) in zip(calls, found[1], strict=False):
            assert name == own and all_of_them.startswith(arguments)


def test_a_limit_takes_no_words_away() -> None:
    cut = [
        (HERMES, "x < y"),
        (HERMES, "<tool_call>\nbad"),
        (LLAMA, '{"name": "Bob", "a'),
        (LLAMA, '{"answer'),
    ]
    for format, text in (*cut, (MISTRAL, "[1"), (LLAMA, "  ")):
        assert read(format, text, [], cut=True) == (text, []), text
    assert read(HERMES, "x <tool", []) == ("x <tool", []), "the model ended this one itself"


MARKUP = ["<tool_call>", "</tool_call>", "<tool", '{"name": "read", "arguments": ', "{}", '{"a": "}"}', "}"]
PARTS = [*MARKUP, "\n", "x", "[", "]", ", ", '"']
JOINED = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)


@given(st.sampled_from([HERMES, LLAMA, MISTRAL]), JOINED, st.data())
@settings(max_examples=300)
def test_random_texts_lose_nothing_to_cuts(format: CallFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    found = read(format, text, cuts)
    assert found == read(format, text, [])
    assert read(format, text, cuts, cut=True) == read(format, text, [], cut=True)
    if not found[1]:
        assert found[0] == text, "a text without calls is content, to the character"


def test_further_calls_than_allowed_are_content() -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    content, calls = read(HERMES, f"{call}\n{call}", [], most=1)
    assert calls == [("read", "{}")] and content.startswith("<tool_call>")


LIST = [
    {"type": "function", "function": {"name": "read", "parameters": {
        "type": "object", "properties": {"path": {"$ref": "#/$defs/path"}}, "required": ["path"],
        "additionalProperties": False, "$defs": {"path": {"enum": ["a", "b"]}},
    }}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip
CALLS_OF = "{{ tools }}{%% for m in messages %%}{{ m.content or '' }}{%% for c in m.tool_calls or [] %%}%s{{ c.function.name }}%s{{ c.function.arguments | tojson }}%s{%% endfor %%}{%% endfor %%}"  # fmt: skip
TEMPLATES = {
    "none": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "hermes": CALLS_OF % ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "llama": CALLS_OF % ('{"name": "', '", "parameters": ', "}"),
    "mistral": CALLS_OF % ('[TOOL_CALLS] [{"name": "', '", "arguments": ', ', "id": "abcdefghi"}]'),
    "unread": CALLS_OF % ("CALL ", " WITH ", ""),
}


def tools(template: str = "hermes", choice: Any = None, parallel: bool | None = None) -> Tools:
    listed = [Tool.model_validate(each) for each in LIST]
    chat = ChatTemplate({"default": TEMPLATES[template]})
    made = Tools.of(listed, choice, parallel, Tokenizer(tiny_tokenizer(), chat))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def llm() -> foredraft.LLM:
    return foredraft.load(drafter="none", max_length=64)


def allows(llm: foredraft.LLM, grammar: str | None, text: str) -> bool:
    assert grammar is not None and llm.tokenizer is not None
    ends = frozenset(llm.loaded.spec.eos_token_ids)
    grammars = Grammars(ByteCodec(llm.tokenizer), llm.loaded.spec.vocab_size, ends)
    matcher = grammars.maker("grammar", grammar)()._matcher
    ids = llm.tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


ONE = {
    "hermes": '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>',
    "llama": '{"name": "read", "parameters": {"path": "a"}}',
    "mistral": '[TOOL_CALLS] [{"name": "read", "arguments": {"path": "a"}}]',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama": ONE["llama"] + '; {"name": "stop", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "stop", "arguments": {}}]',
}


@pytest.mark.parametrize("template", ["hermes", "llama", "mistral", "none", "unread"])
def test_a_required_call_is_a_call_of_a_tool_with_its_arguments(llm: foredraft.LLM, template: str) -> None:
    form = "hermes" if template in ("none", "unread") else template
    grammar = tools(template, "required").grammar(None)
    assert allows(llm, grammar, ONE[form]) and allows(llm, grammar, TWO[form])
    one = ONE[form]
    for wrong in ("", "hello", one.replace('"a"', '"c"'), one.replace("read", "open"), one[:-1]):
        assert not allows(llm, grammar, wrong), wrong
    assert not allows(llm, tools(template, "required", parallel=False).grammar(None), TWO[form])
    named = NamedChoice.model_validate({"type": "function", "function": {"name": "stop"}})
    assert not allows(llm, tools(template, named).grammar(None), ONE[form])
    assert read_names(tools(template, named), ONE[form]) == []


def read_names(made: Tools, text: str) -> list[str]:
    reader = made.reader()
    reader.read(text)
    reader.end()
    return [call.name for call in reader.calls]


@pytest.mark.parametrize("template", ["hermes", "llama", "mistral"])
def test_a_free_text_may_call(llm: foredraft.LLM, template: str) -> None:
    grammar = tools(template).grammar(None)
    for text in ("", "hello <tool_ca and {so on", ONE[template], TWO[template]):
        assert allows(llm, grammar, text), text
    assert not allows(llm, grammar, ONE[template].replace("read", "open"))
    assert allows(llm, grammar, "Sure.\n" + ONE[template])  # under Llama's it is no call
    answer = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    either = tools(template).grammar(answer | {"additionalProperties": False})
    if template == "llama":
        assert either is None, "a request for both is refused"
        return
    assert allows(llm, either, '{"x": 5}') and allows(llm, either, ONE[template])
    assert not allows(llm, either, "hello") and not allows(llm, either, '{"x": "5"}')


def test_a_template_that_reads_tools_gets_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    same, variables = tools("hermes").prompt(messages)
    assert same == messages
    assert [each["function"]["name"] for each in variables["tools"]] == ["read", "stop"]
    found = [tools(template).format for template in ("mistral", "llama", "unread")]
    assert found == [MISTRAL, LLAMA, HERMES]


@pytest.mark.parametrize("template", ["none", "unread"])
def test_another_template_gets_them_as_text(template: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "text of a"},
    ]
    made, variables = tools(template).prompt(messages)
    assert variables == {}
    assert made[0]["content"].startswith("Be brief.\n\n") and '"path"' in made[0]["content"]
    lines = made[0]["content"].split("<tools>\n")[-1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines] == ["read", "stop"]
    assert made[1] == messages[1]
    assert read_names(tools(template), made[2]["content"]) == ["read"]
    assert made[3] == {"role": "user", "content": "<tool_response>\ntext of a\n</tool_response>"}
    [system, user] = tools(template).prompt(messages[1:2])[0]
    assert system["role"] == "system" and user == messages[1]
