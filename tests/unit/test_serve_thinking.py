"""Reasoning of replies: which markers a model has, and which variables its template gets."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.decode.thinking import ThinkingMarkers
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.conversation import template_variables, thinking_after
from foredraft.serve.requests import ChatRequest
from foredraft.serve.responses import ResponsesRequest
from tests.support.checkpoints import tiny_tokenizer

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
        (PLAIN, {}, None),
    ],
)
def test_the_markers_and_the_begin_of_the_thinking_are_those_of_the_template(
    template: str, variables: dict[str, Any], want: ThinkingMarkers | None
) -> None:
    made = tokenizer(template)
    assert thinking_after(made, made.chat_text([USER], **variables)) == want


def test_a_vocabulary_shows_markers_where_the_template_does_not() -> None:
    made = tokenizer(PLAIN, added=("<think>", "</think>"))
    assert thinking_after(made, made.chat_text([USER])) == ThinkingMarkers("<think>", "</think>")
    made = tokenizer(PLAIN, added=("[THINK]", "[/THINK]"))
    found = thinking_after(made, made.chat_text([USER]), stops=True)
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


def test_the_effort_of_a_response_is_that_of_its_chat() -> None:
    body = {"model": "demo", "input": "hi", "reasoning": {"effort": "none", "summary": "auto"}}
    for given, effort in ((body, "none"), ({"model": "demo", "input": "hi"}, None)):
        chat = ResponsesRequest.chat_of(given)
        assert isinstance(chat, ChatRequest) and chat.reasoning_effort == effort
