"""Conversation: the messages of the API -> those that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foredraft.serve.problems import Problem

__all__ = ["messages_of", "text_of"]


def messages_of(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
