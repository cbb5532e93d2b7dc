"""One conversation told to templates that take less than the API: no calls, no system message, no neighbours."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.errors import RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.serve.conversation import fitted, messages_of, spelled_out
from foredraft.serve.problems import Problem

# As Gemma's, Llama 2's and Llama 3.1's templates refuse messages.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATING
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}{{ m.tool_calls[0].function.name }};"
    "{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)


def call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


USER = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("1", "read"), call("2", "write")]}
RESULTS = [result("2", "second"), result("1", "first")]


def told(template: str, messages: list[dict[str, Any]]) -> str:
    """Return what the first form that a template takes makes of messages."""
    chat, read = ChatTemplate({"default": template}), messages_of(messages)
    if "tool_calls" not in template:
        read = spelled_out(read)
    for form in fitted(read):
        try:
            return chat.render(form)
        except RequestError:
            pass
    raise AssertionError("no form was taken")


def test_what_a_template_takes_is_told_as_it_is() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    messages = [{"role": "system", "content": "s"}, USER, USER]
    assert told(plain, messages) == "system: s;user: hi;user: hi;"
    assert list(fitted([USER])) == [[USER]] and list(fitted([])) == [[]]


def test_neighbours_of_one_role_become_one() -> None:
    assert told(ALTERNATING, [USER, {"role": "user", "content": "there"}]) == "user: hi\n\nthere;"
    answered = [USER, CALLS, *RESULTS, USER]
    text = told(ALTERNATING, answered)
    assert text.count("user:") == 2 and text.count("<tool_response>") == 2 and text.endswith("hi;")
    assert '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>' in text


def test_a_system_message_joins_the_first_user_message() -> None:
    system = {"role": "system", "content": "be brief"}
    assert told(NO_SYSTEM, [system, USER]) == "user: be brief\n\nhi;"
    assert told(NO_SYSTEM, [system, system, USER]) == "user: be brief\n\nbe brief\n\nhi;"
    assert told(NO_SYSTEM, [system]) == "user: be brief;"


def test_calls_of_one_turn_come_in_turns_each_with_its_result() -> None:
    found = told(ONE_CALL, [USER, {**CALLS, "content": "both"}, *RESULTS, result("3", "stray"), USER])
    assert found == "user: hi;read;tool: first;write;tool: second;tool: stray;user: hi;"
    [_, turns] = fitted(messages_of([{**CALLS, "content": "both"}]))
    assert [each["content"] for each in turns] == ["both", None]  # the text comes once


def many_calls(count: int) -> list[dict[str, Any]]:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f"}} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in reversed(range(count))]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]


def test_ids_of_calls_and_results_of_one_turn_are_single() -> None:
    good = many_calls(3)
    assert len(messages_of([*good, *good])) == 10  # a later turn may use them again
    for place, at in ((1, "messages[1].tool_calls[2].id"), (4, "messages[4].tool_call_id")):
        wrong = copy.deepcopy(good)
        if place == 1:
            wrong[1]["tool_calls"][2]["id"] = "c0"
        else:
            wrong[4]["tool_call_id"] = "c2"
        with pytest.raises(Problem, match=re.escape(f"{at} is 'c")):
            messages_of(wrong)
    for id in (7, ["x"], {}):
        with pytest.raises(Problem, match="give a string"):
            messages_of([{"role": "tool", "tool_call_id": id, "content": ""}])


@pytest.mark.parametrize("kind", ["calls", "results"])
def test_many_calls_or_results_of_one_id_are_refused_before_any_is_rendered(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """463 kB took gigabytes and minutes where each call was told with all results of its id."""
    monkeypatch.setattr(ChatTemplate, "render", lambda *given: pytest.fail("a form was rendered"))
    given = many_calls(3_500)
    if kind == "calls":
        for each in given[1]["tool_calls"]:
            each["id"] = "c0"
    for each in given[2:]:
        each["tool_call_id"] = "c0"
    assert len(json.dumps(given)) > 400_000
    began = time.process_time()
    with pytest.raises(Problem, match=r"is 'c0', as an earlier one of the same turn"):
        told(ONE_CALL, given)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("named", [True, False])
def test_many_calls_of_one_turn_are_each_rendered_once(named: bool) -> None:
    given, count = many_calls(600), 600
    if not named:  # ids may be left out
        for each in [*given[1]["tool_calls"], *given[2:]]:
            each.pop("id", None)
            each.pop("tool_call_id", None)
    found = told(ONE_CALL, given)
    assert (found.count("f;"), found.count("tool: ")) == (count, count)


def test_forms_of_a_conversation_grow_with_it_and_not_with_its_square() -> None:
    for id in (None, "same"):  # the form tells no result twice, whatever ids the check lets through
        given = many_calls(200)
        for each in given[2:]:
            each["tool_call_id"] = id
        for call in given[1]["tool_calls"]:
            call["id"] = id
        forms = list(fitted(given))
        assert [len(form) for form in forms] == [202, 401]
    given = many_calls(50)
    [_, turns, *_] = fitted(given)
    assert [each["tool_call_id"] for each in turns[2::2]] == [f"c{i}" for i in range(50)]


@pytest.mark.parametrize("silent", [{"content": None}, {}, {"content": None, "tool_calls": []}], ids=str)
def test_an_assistant_message_that_says_nothing_is_an_empty_one(silent: dict[str, Any]) -> None:
    """Most templates join a message's content to other text, and fail without one."""
    chat = ChatTemplate(
        {"default": "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"}
    )
    user = {"role": "user", "content": "Hi"}
    made = messages_of([user, {"role": "assistant", **silent}, user])
    assert chat.render(made) == "[user]Hi[assistant][user]Hi"


def test_a_message_of_calls_alone_has_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    [made] = messages_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert made["content"] is None


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "image", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(Problem, match=f"part of type '{kind}', but only text is read"):
        messages_of([{"role": "user", "content": content}])
