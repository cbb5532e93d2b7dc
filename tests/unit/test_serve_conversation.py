"""One conversation told to templates that take less than the API: no calls, no system message, no neighbours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.errors import RequestError
from foredraft.model.chat import ChatTemplate
from foredraft.serve.conversation import fitted, messages_of, spelled_out

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
