"""Items of the input of POST /v1/responses -> chat messages.

The server keeps no state, so an item stands for itself: one that names an earlier response's is refused,
unless it names reasoning, which the model can do without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foredraft.errors import shortened
from foredraft.serve.conversation import REASONING, Messages
from foredraft.serve.problems import Problem

__all__ = ["messages_of_items"]

TEXTS = {  # types of parts -> where their text is
    "input_text": "text", "output_text": "text", "refusal": "refusal",
}  # fmt: skip
REASONING_ID = "rs_"  # begins the ids of reasoning items
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
RESULTS = ("function_call_output", "custom_tool_call_output")


def messages_of_items(items: list[dict[str, Any]]) -> Messages:
    """Return the messages of a conversation; what the assistant thought, said and called in a turn are one.

    Raises:
        Problem: An item is not supported.
    """
    messages: Messages = []
    for item in items:
        _add(messages, item)
    return [each for each in messages if not _is_thought(each)]


def _add(messages: Messages, item: dict[str, Any]) -> None:
    kind = str(item.get("type", "message"))
    if kind == "message":
        message = {"role": item.get("role"), "content": _texts(item.get("content"))}
        if message["role"] == "assistant" and messages and _is_thought(messages[-1]):
            messages[-1] |= message
        else:
            messages.append(message)
    elif kind in CALLS:
        given = item.get(CALLS[kind], "{}")
        arguments = given if kind == "function_call" else json.dumps({"input": given})
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind in RESULTS:
        text = _texts(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        if text := _reasoning(item):
            messages.append({"role": "assistant", "content": None, REASONING: text})
    elif kind == "item_reference":
        if not str(item.get("id")).startswith(REASONING_ID):
            says = f"input refers to the item {shortened(item.get('id'))}, and this server keeps no items"
            raise Problem(
                400, f'{says}; send the item itself, as clients do with "store": false', param="input"
            )
    else:
        raise Problem(400, f"input items of type {shortened(kind)} are not supported", param="input")


def _turn(messages: Messages) -> dict[str, Any]:
    """Return the message of the assistant's turn that goes on."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _is_thought(message: Mapping[str, Any]) -> bool:
    """Return whether a message is reasoning that nothing has followed yet."""
    return REASONING in message and message["content"] is None and "tool_calls" not in message


def _reasoning(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; "" where it has none that can be read."""
    parts = item.get("content") or item.get("summary") or []
    texts = (
        [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    )
    return "\n".join(text for text in texts if isinstance(text, str))


def _texts(content: Any) -> Any:
    """Return content with the parts of chat completions in place of this API's."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text", "text": part.get(TEXTS[part["type"]])}
        if isinstance(part, dict) and str(part.get("type")) in TEXTS
        else part
        for part in content
    ]
