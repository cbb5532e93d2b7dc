"""Conversations: told to templates that take less than the API, and as items of responses; the marks of reasoning."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.conversation import (
    FINAL,
    messages_of,
    messages_of_items,
    template_variables,
    thinking_after,
)
from foredraft.serve.forms import chat_text, forms
from foredraft.serve.problems import Problem
from foredraft.serve.requests import ChatRequest
from foredraft.serve.responses import ResponsesRequest
from tests.support.checkpoints import tiny_tokenizer

# As Gemma's, Llama 2's and Llama 3.1's templates refuse messages.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}{{ m.tool_calls[0].function.name }};"
    "{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("1", "read"), call("2", "write")]}
RESULTS = [result("2", "second"), result("1", "first")]
SYSTEM = {"role": "system", "content": "be brief"}


def told(template: str, messages: list[dict[str, Any]]) -> str:
    return chat_text(tokenizer(template), messages_of(messages), {})


def test_what_a_template_takes_is_told_as_it_is() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    messages = [{"role": "system", "content": "s"}, USER, USER]
    assert told(plain, messages) == "system: s;user: hi;user: hi;"
    assert list(forms([USER])) == [[USER]]


def test_a_wrong_request_teaches_nothing_about_a_template() -> None:
    own = tokenizer(NATIVE.replace("ARGUMENTS", AS_TEXT))
    with pytest.raises(RequestError):
        chat_text(own, messages_of([USER, CALLS, *RESULTS]), {"unread": 1})
    assert "(read {})" in chat_text(own, messages_of([USER, CALLS, *RESULTS]), {})


def test_a_result_without_an_id_gets_no_name() -> None:
    nameless = {**CALLS, "tool_calls": [{**call("", "read"), "id": None}]}
    *_, last = messages_of([USER, nameless, {"role": "tool", "content": "first"}])
    assert "name" not in last


def test_forms_are_few_however_long_the_conversation() -> None:
    late = {"role": "system", "content": "late"}
    turns = [USER, {**CALLS, "content": "I look"}, *RESULTS, late, USER, late]
    assert len(list(forms([SYSTEM, *turns * 3]))) <= 96
    assert len(list(forms([SYSTEM, USER, {"role": "assistant", "content": "yes"}, USER]))) <= 2


def test_neighbours_of_one_role_become_one() -> None:
    assert told(ALTERNATING, [USER, {"role": "user", "content": "there"}]) == "user: hi\n\nthere;"
    answered = [USER, CALLS, *RESULTS, USER]
    text = told(ALTERNATING, answered)
    assert text.count("user:") == 2 and text.count("<tool_response>") == 2 and text.endswith("hi;")
    assert '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>' in text


def test_a_system_message_joins_the_first_user_message() -> None:
    assert told(NO_SYSTEM, [SYSTEM, USER]) == "user: be brief\n\nhi;"
    assert told(NO_SYSTEM, [SYSTEM, SYSTEM, USER]) == "user: be brief\n\nbe brief\n\nhi;"
    assert told(NO_SYSTEM, [SYSTEM]) == "user: be brief;"


def test_calls_of_one_turn_come_in_turns_each_with_its_result() -> None:
    found = told(ONE_CALL, [USER, {**CALLS, "content": "both"}, *RESULTS, result("3", "stray"), USER])
    assert found == "user: hi;assistant: both;read;tool: first;write;tool: second;tool: stray;user: hi;"
    _, turns, *_ = forms(messages_of([{**CALLS, "content": "both"}]))
    assert [each["content"] for each in turns] == ["both", ""]  # the text comes once


def many_calls(count: int) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": {}}} for i in range(count)
    ]
    results = [result(f"c{i}", str(i)) for i in reversed(range(count))]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def test_ids_of_calls_and_results_of_one_turn_are_single() -> None:
    assert len(messages_of(many_calls(3) * 2)) == 10  # a later turn may use them again
    two_calls, two_results = many_calls(3), many_calls(3)
    two_calls[1]["tool_calls"][2]["id"] = "c0"
    two_results[4]["tool_call_id"] = "c2"
    for wrong, at in ((two_calls, "messages[1].tool_calls[2].id"), (two_results, "messages[4].tool_call_id")):
        with pytest.raises(Problem, match=re.escape(f"{at} is 'c")):
            messages_of(wrong)
    for id in (7, ["x"], dict[str, Any]()):
        with pytest.raises(Problem, match="give a string"):
            messages_of([{"role": "tool", "tool_call_id": id, "content": ""}])


@pytest.mark.parametrize("id", [None, "same", "{}"])
def test_forms_of_a_conversation_grow_with_it_and_not_with_its_square(id: str | None) -> None:
    """The form tells no call and no result twice, whatever ids the check lets through; they may be left out."""
    given = many_calls(200)
    for number, (call, result) in enumerate(zip(given[1]["tool_calls"], given[:1:-1], strict=True)):
        call["id"] = result["tool_call_id"] = id and id.format(number)
    found = list(forms(given))
    assert max(map(len, found)) == 401 and len(found) < 24
    if id == "{}":
        turns = next(form for form in found if len(form) == 401)
        assert [each["content"] for each in turns[2::2]] == [str(number) for number in range(200)]
    if id != "same":  # which no request may have
        text = told(ONE_CALL, given)
        assert (text.count("f;"), text.count("tool: ")) == (200, 200)


SILENT = "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% endif %}{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"  # fmt: skip
STRICT = SILENT.replace("{% if m.role", "{% if m.role == 'system' and loop.index0 %}{{ raise_exception('late') }}{% endif %}{% if m.role")  # fmt: skip
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", "user: hi;assistant: yes;system: now;user: hi;"),
        (SILENT, "now;user: hi;assistant: yes;user: hi;"),
        (STRICT, "now;user: hi;assistant: yes;user: hi;"),
        (NO_SYSTEM, "user: hi;assistant: yes;user: now\n\nhi;"),
    ],
)  # fmt: skip
def test_a_late_system_message_is_told_where_the_template_shows_it(
    template: str, want: str, role: str
) -> None:
    late = {"role": role, "content": "now"}
    assert told(template, [USER, ANSWER, late, USER]) == want
    if template != NO_SYSTEM:
        assert told(template, [SYSTEM, USER, ANSWER, late]).count("now;") == 1


def test_a_late_system_message_is_the_user_s_where_the_template_refuses_any() -> None:
    one_word = "{% if messages[0].role == 'system' and '\\n' in messages[0].content %}{{ raise_exception('one') }}{% endif %}"
    found = told(one_word + STRICT, [SYSTEM, USER, ANSWER, {"role": "system", "content": "now"}, USER])
    assert found == "be brief;user: hi;assistant: yes;user: now\n\nhi;"
    found = told(one_word + STRICT, [SYSTEM, USER, ANSWER, {"role": "system", "content": "now"}])
    assert found == "be brief;user: hi;assistant: yes;user: now;"


def test_a_message_that_no_form_shows_is_refused_by_name() -> None:
    deaf = "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }};{% endif %}{% endfor %}"
    with pytest.raises(RequestError, match=r"leaves out messages\[1\], whose role is 'critic'"):
        told(deaf, [USER, {"role": "critic", "content": "hi"}])


NATIVE = "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}({{ c.function.name }} {{ ARGUMENTS }}){% endfor %}{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"  # fmt: skip
AS_OBJECT, AS_TEXT = "c.function.arguments | tojson", "'' + c.function.arguments"


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (NATIVE.replace("ARGUMENTS", AS_OBJECT), "user: hi;(read {})tool: first;"),  # it writes None
        (NATIVE.replace("ARGUMENTS", AS_TEXT), "user: hi;(read {})tool: first;"),
        (NATIVE.replace("ARGUMENTS", AS_OBJECT).replace("{{ m.content }}{%", "{% if m.content is none %}null{% endif %}{%"), "user: hi;null(read {})tool: first;"),
        (NATIVE.replace("ARGUMENTS", AS_OBJECT).replace("{{ m.content }}{%", "{% if 'x' in m.content %}x{% endif %}{%"), "user: hi;(read {})tool: first;"),
    ],
)  # fmt: skip
def test_a_call_is_told_with_the_content_and_the_arguments_that_its_template_takes(
    template: str, want: str
) -> None:
    calls = {**CALLS, "tool_calls": [call("1", "read")]}
    assert told(template, [USER, calls, result("1", "first")]) == want
    assert told(template, [USER, {**ANSWER, "tool_calls": []}]) == "user: hi;assistant: yes;"


def test_a_result_has_the_name_of_its_call() -> None:
    named = [each["name"] for each in messages_of([USER, CALLS, *RESULTS])[2:]]
    assert named == ["write", "read"]
    assert "name" not in messages_of([USER, CALLS, result("3", "stray")])[2]


MISTRAL = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}({{ c.id }} {{ c.function | tojson }}){% endfor %}{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ m.tool_call_id }} {{ m.content }}]{% if loop.nextitem and loop.nextitem.role == 'user' %}{{ raise_exception('answer') }}{% endif %}{% else %}{{ m.content }};{% endif %}{% endfor %}"  # fmt: skip


def test_ids_of_other_servers_are_as_long_as_a_template_asks() -> None:
    found = told(MISTRAL, [USER, {**CALLS, "content": ""}, *RESULTS, USER])
    ids = re.findall(r"[(\[]([0-9a-z]{9}) ", found)
    assert len(set(ids)) == 2 and ids[:2] == ids[:1:-1]  # each result is its call's
    assert found.endswith("first];hi;")  # the answer between them is empty


@pytest.mark.parametrize("cut", ['{"path": "a', "{", "null", "[1]", '{"a": 1} {'])
def test_a_call_that_was_cut_is_told_as_it_was_written(cut: str) -> None:
    broken = {**call("1", "read"), "function": {"name": "read", "arguments": cut}}
    closes = "}" if cut in ("null", "[1]") else ""
    given = [USER, {**CALLS, "tool_calls": [broken]}, result("1", "no JSON"), {**CALLS, "tool_calls": [call("2", "write")]}, result("2", "good")]  # fmt: skip
    found = told(NATIVE.replace("ARGUMENTS", AS_OBJECT), given)
    assert f'assistant: <tool_call>\n{{"name": "read", "arguments": {cut}{closes}\n</tool_call>;' in found
    assert "user: <tool_response>\nno JSON\n</tool_response>;" in found
    assert found.endswith("(write {})tool: good;")  # the others are told as ever


@pytest.mark.parametrize("silent", [{"content": None}, {}, {"content": None, "tool_calls": []}], ids=str)
def test_an_assistant_message_that_says_nothing_is_an_empty_one(silent: dict[str, Any]) -> None:
    """Most templates join a message's content to other text, and fail without one. Calls need none."""
    joining = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    made = messages_of([USER, {"role": "assistant", **silent}, USER])
    assert ChatTemplate({"default": joining}).render(made) == "[user]hi[assistant][user]hi"
    assert messages_of([CALLS])[0]["content"] is None


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "image", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(Problem, match=f"part of type '{kind}', but only text is read"):
        messages_of([{"role": "user", "content": content}])


CALL_ITEM = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "read", "arguments": '{"a": 1}'}
CALLED = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    said = {"content": [{"type": "text", "text": "I look."}], "reasoning_content": "why"}
    made = messages_of_items([USER, thought, text, CALL_ITEM])
    assert made == [USER, {"role": "assistant", **said, "tool_calls": [CALLED]}]
    assert messages_of_items([thought, CALL_ITEM])[0]["reasoning_content"] == "why"
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    assert messages_of_items([summary, CALL_ITEM])[0]["reasoning_content"] == "so"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "alone"}]},
        {"type": "item_reference", "id": "rs_1"},
    ],
    ids=str,
)
def test_reasoning_that_nothing_follows_or_only_its_server_reads_is_dropped(
    item: dict[str, Any],
) -> None:
    assert messages_of_items([USER, item]) == [USER]


def test_a_refusal_is_what_the_assistant_said() -> None:
    [made] = messages_of_items([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}])
    assert made["content"][0]["text"] == "No." and made["content"][0]["type"] == "text"


def test_calls_of_tools_with_free_text_and_their_results_are_told() -> None:
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    made = messages_of_items([custom, result])
    [call] = made[0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"input": "*** Begin"}
    assert made[1] == {"role": "tool", "tool_call_id": "1", "content": "done"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"type": "item_reference", "id": "msg_1"}, '"store": false'),
        ({"type": "item_reference"}, '"store": false'),
        ({"type": "computer_call"}, "computer_call"),
        ({"type": ["message"]}, "not supported"),
    ],
    ids=str,
)
def test_what_stands_elsewhere_or_is_not_known_is_refused(item: dict[str, Any], says: str) -> None:
    with pytest.raises(Problem, match=says):
        messages_of_items([USER, item])


# What templates of published models say of reasoning.
HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
QWEN = HEAD + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
R1 = HEAD + "<think>\n{% endif %}{# content.split('</think>')[-1] #}"
V3 = HEAD + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
GRANITE = "{% if thinking %}Write your thoughts between <think></think> and your response between <response></response>.{% endif %}" + HEAD + "{% endif %}"  # fmt: skip
OLDER = "{% if thinking %}Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'.{% endif %}" + HEAD + "{% endif %}"  # fmt: skip
EFFORT = HEAD + "{{ reasoning_effort }}{% endif %}"
# https://huggingface.co/google/gemma-4-E4B-it, and the larger ones, which begin an empty thought where none is asked for
GEMMA_4 = HEAD + "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
GPT_OSS = HEAD + "{% endif %}{# '<|channel|>analysis<|message|>' + message.thinking #}"
PLAIN = HEAD + "{% endif %}"
ASKED = {"role": "user", "content": "What is </think>?"}


def tokenizer(template: str | None, *, added: tuple[str, ...] = ()) -> Tokenizer:
    inner = tiny_tokenizer()
    inner.add_tokens(list(added))
    return Tokenizer(inner, None if template is None else ChatTemplate({"default": template}))


@pytest.mark.parametrize(
    ("template", "variables", "want"),
    [
        (QWEN, {}, ThinkingMarkers("<think>", "</think>")),
        (QWEN, {"enable_thinking": False}, None),
        (R1, {}, ThinkingMarkers("<think>", "</think>", begun=True)),
        (V3, {"thinking": True}, ThinkingMarkers("<think>", "</think>", begun=True)),
        (V3, {"thinking": False}, None),
        (
            GRANITE,
            {"thinking": True},
            ThinkingMarkers("<think>", "</think>", answer=("<response>", "</response>")),
        ),
        (OLDER, {"thinking": True}, ThinkingMarkers("Here is my thought process:", "Here is my response:")),
        (GEMMA_4, {"enable_thinking": True}, ThinkingMarkers("<|channel>thought", "<channel|>")),
        (GEMMA_4, {}, None),
        (
            GPT_OSS,
            {},
            ThinkingMarkers(
                "<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{FINAL}", answer=(FINAL, "")
            ),
        ),
        (PLAIN, {}, None),
    ],
)
def test_the_markers_and_the_begin_of_the_thinking_are_those_of_the_template(
    template: str, variables: dict[str, Any], want: ThinkingMarkers | None
) -> None:
    made = tokenizer(template)
    assert thinking_after(made, made.chat_text([ASKED], **variables)) == want


def test_a_vocabulary_shows_markers_where_the_template_does_not() -> None:
    made = tokenizer(PLAIN, added=("<think>", "</think>"))
    assert thinking_after(made, made.chat_text([ASKED])) == ThinkingMarkers("<think>", "</think>")
    made = tokenizer(PLAIN, added=("[THINK]", "[/THINK]"))
    found = thinking_after(made, made.chat_text([ASKED]), stops=True)
    assert found == ThinkingMarkers("[THINK]", "[/THINK]", stops=True)


@pytest.mark.parametrize(
    ("begun", "want"),
    [
        ("<think>\nhm", ThinkingMarkers("<think>", "</think>", begun=True)),
        ("<think>\nhm\n</think>\n\nYes", None),
        ("Yes, ", None),
        ("", ThinkingMarkers("<think>", "</think>")),
    ],
)
def test_a_begun_reply_goes_on_where_it_stands(begun: str, want: ThinkingMarkers | None) -> None:
    made = tokenizer(QWEN)
    messages = [ASKED, {"role": "assistant", "content": begun}]
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


def test_the_effort_of_a_response_is_that_of_its_chat() -> None:
    body = {"model": "demo", "input": "hi", "reasoning": {"effort": "none", "summary": "auto"}}
    for given, effort in ((body, "none"), ({"model": "demo", "input": "hi"}, None)):
        chat = ResponsesRequest.chat_of(given)
        assert isinstance(chat, ChatRequest) and chat.reasoning_effort == effort
