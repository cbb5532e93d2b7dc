"""Published chat templates render the same text as in transformers, or fail for the same reason.

The templates are those of the package `xinference` (Apache-2.0), which keeps them for the models that it serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import transformers

from foredraft.errors import RequestError
from foredraft.model.chat import ChatTemplate
from tests.support import real_models
from tests.support.checkpoints import tiny_tokenizer

MAX_MISSING = 5  # templates that may fail with all conversations: in transformers, too
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "  Is 2 < 3 & so on? 漢🙂 "}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What?"}]}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
REASONED = {"role": "assistant", "content": "Yes.", "reasoning_content": "since so"}
ARGUMENTS = {"city": "Zürich", "deep": {"a": [1, None, True]}}
CALL = {
    "role": "assistant",
    "content": "Well",
    "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        for id in ("abcdefghi", "123456789")
    ],
}
RESULT = {"role": "tool", "content": "22 °C <b>", "name": "weather", "tool_call_id": "abcdefghi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <wet>\nin Zürich",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "city": {"type": "string", "description": "Where", "enum": ["Bern", "Zürich"]},
                "n": {"type": ["integer", "null"], "default": 3},
                "deep": {
                    "type": "object",
                    "properties": {"a": {"type": "array", "items": {"type": "number"}}},
                },
            },
        },
    },
}
CONTINUED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Yes, "},
    {"role": "assistant", "content": "<think>\nhm"},
    THOUGHT,
    REASONED,
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [PARTS],
    [SYSTEM, USER, THOUGHT, USER, REASONED],
    [USER, CALL, RESULT, RESULT, THOUGHT, USER],
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER, WEATHER]},
    {"enable_thinking": False},
    {"reasoning_effort": "high"},
    {"add_generation_prompt": False},
]


@cache
def templates() -> dict[str, str]:
    """Return the templates of the package, by the name of a model that has it."""
    found: dict[str, str] = {}
    for file in sorted((real_models.package("xinference") / "model/llm/models").glob("*.json")):
        listed = json.loads(file.read_text(encoding="utf-8"))
        for model in listed if isinstance(listed, list) else [listed]:
            text = model.get("chat_template") or ""
            if "{" in text and text not in found.values():
                found[model["model_name"]] = text
    return found


def rendered(render: Callable[..., str], *arguments: Any, **variables: Any) -> str | Exception:
    """Return the text, or the error."""
    try:
        return render(*arguments, **variables)
    except Exception as error:
        return error


def compare(
    conversations: list[list[dict[str, Any]]], variables: list[dict[str, Any]], **options: bool
) -> tuple[int, set[str]]:
    """Compare conversations under variables that a template reads; returns the equal texts, and templates without one."""
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), **SPECIAL)
    texts, failing = 0, set(templates())
    for name, source in templates().items():
        chat = ChatTemplate({"default": source}, SPECIAL)
        for messages, given in product(conversations, variables):
            if any(variable not in source for variable in given):
                continue
            theirs = options | given | {"chat_template": source, "tokenize": False}
            expected = rendered(reference.apply_chat_template, messages, **theirs)
            found = rendered(chat.render, messages, **options | given)
            if isinstance(expected, str):
                assert found == expected, name
                texts += 1
                failing.discard(name)
            else:
                assert isinstance(found, RequestError), name
                # where a template calls itself, and where a message cannot be continued, each program has its own message
                if "continue_final_message" not in options and not isinstance(expected, RecursionError):
                    assert " ".join(str(expected).split()) in str(found), name
    return texts, failing


@pytest.mark.heavy
def test_published_templates_render_as_in_transformers() -> None:
    texts, failing = compare(CONVERSATIONS, VARIABLES, add_generation_prompt=True)
    assert len(templates()) > 80 and texts > 700
    assert len(failing) <= MAX_MISSING, failing


@pytest.mark.heavy
def test_published_templates_continue_a_message_as_in_transformers() -> None:
    conversations = [[USER, last] for last in CONTINUED]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    texts, _ = compare(conversations, VARIABLES[:3], **options)
    assert texts > 300
