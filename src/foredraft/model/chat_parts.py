"""Content parts: whether a chat template takes a message's text as it is or as a list of parts.

Templates of multimodal checkpoints loop over parts such as {"type": "text", "text": ...}. Some of them take a
text as well. One that does not would leave the text out without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["as_parts", "takes_parts_alone"]

PROBE = "foredraftprobe"  # a word that survives what templates do to a message


def takes_parts_alone(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Return whether a template shows a message's text only where it is given as a part.

    Args:
        render: Renders messages; it may raise anything.
    """

    def shows(content: Any) -> bool:
        try:
            return PROBE in render([{"role": "user", "content": content}])
        except Exception:  # the expressions of a template may raise anything
            return False

    return not shows(PROBE) and shows(_parts(PROBE))


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts."""
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]
