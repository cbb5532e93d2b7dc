"""Conversation: the messages of the API -> those that chat templates read.

Templates differ in what they take: some know no calls, some no system message, no two messages of one role in
a row, or no two calls in one turn. The same conversation can be told to each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from foredraft.serve.calls import HERMES
from foredraft.serve.problems import Problem

__all__ = ["Messages", "fitted", "messages_of", "spelled_out", "text_of"]

Messages: TypeAlias = list[dict[str, Any]]


def messages_of(given: Messages) -> Messages:
    """Return messages whose content is text and whose calls have objects as arguments.

    Raises:
        Problem: There is none, or one is malformed.
    """
    if not given:
        raise Problem(400, "messages is empty", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(given)]


def text_of(content: object, name: str, param: str) -> str:
    """Return content as text: the API allows a list of parts, most templates do not.

    Args:
        content: Text, or a list of parts that are text.
        name: Its place, for the error.
        param: The field at fault.

    Raises:
        Problem: It is anything else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(400, f"{name} must be text or a list of parts", param=param)
    texts = []
    for part in content:
        is_text = (
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        )
        if not is_text:
            raise Problem(400, f"{name} has a part that is no text", param=param)
        texts.append(part["text"])
    return "".join(texts)


def spelled_out(messages: Messages) -> Messages:
    """Return messages whose calls and results are text, for a template that knows no calls."""
    return [_spelled_out(message) for message in messages]


def fitted(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, then the same conversation as narrower templates take it, nearest first."""
    yield messages
    for change in (_one_call_a_turn, _one_message_a_turn, _without_system):
        changed = change(messages)
        if changed != messages:
            messages = changed
            yield messages


def _one_call_a_turn(messages: Messages) -> Messages:
    """Return messages in which each call is followed by its result, as if they had come in turns."""
    made: Messages = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        count = next((n for n, each in enumerate(left) if each.get("role") != "tool"), len(left))
        results, left = left[:count], left[count:]
        for place, call in enumerate(calls):
            made.append({**message, "tool_calls": [call]} | ({"content": None} if place else {}))
            made += [each for each in results if each.get("tool_call_id") == call.get("id")]
        ids = [call.get("id") for call in calls]
        made += [each for each in results if each.get("tool_call_id") not in ids]
    return made


def _one_message_a_turn(messages: Messages) -> Messages:
    """Return messages in which neighbours of one role are one."""
    made: Messages = []
    for message in messages:
        before = made[-1] if made else message
        both_text = not any(
            each.get("role") == "tool" or each.get("tool_calls") for each in (before, message)
        )
        if made and both_text and message.get("role") == before.get("role"):
            made[-1] = {**before, "content": _paragraphs(before.get("content"), message.get("content"))}
        else:
            made.append(message)
    return made


def _without_system(messages: Messages) -> Messages:
    """Return messages whose first system message is a part of the first user message."""
    if not messages or messages[0].get("role") != "system":
        return messages
    says, rest = messages[0].get("content"), messages[1:]
    if rest and rest[0].get("role") == "user":
        says, rest = _paragraphs(says, rest[0].get("content")), rest[1:]
    return [{"role": "user", "content": says}, *rest]


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def _spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        says = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": says}
    if not message.get("tool_calls"):
        return message
    written = [
        HERMES.opens
        + json.dumps({"name": each["name"], "arguments": each["arguments"]}, ensure_ascii=False)
        + HERMES.closes
        for each in (call["function"] for call in message["tool_calls"])
    ]
    parts = [message["content"]] if message.get("content") else []
    return {"role": message.get("role"), "content": HERMES.between.join([*parts, *written])}


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = dict(message)
    if message.get("content") is not None:
        made["content"] = text_of(message["content"], f"{name}.content", "messages")
    if message.get("role") == "developer":  # the newer name of the system message
        made["role"] = "system"
    if message.get("tool_calls") is not None:
        made["tool_calls"] = _calls(message["tool_calls"], f"{name}.tool_calls")
    return made


def _calls(given: object, name: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier reply; templates read arguments as an object."""
    if not isinstance(given, list):
        raise Problem(400, f"{name} must be a list", param="messages")
    calls = []
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Problem(400, f"{name}[{place}] has no function with a name", param="messages")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise Problem(
                    400, f"{name}[{place}] has arguments that are no JSON", param="messages"
                ) from None
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
