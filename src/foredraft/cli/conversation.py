"""The messages of a conversation: their token ids, and the file that keeps them.

A reply that Ctrl-C ended stays in the conversation as far as it came. A turn that failed is not added to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import RequestError
from foredraft.files import replacing
from foredraft.model.prompt_form import chat_ids

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["Conversation"]

ROLES = ("system", "user", "assistant")


class Conversation:
    """The messages of a conversation.

    Attributes:
        turns: Messages of the user and the assistant, in order. The system message is kept apart, so that
            `clear` leaves it.
    """

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [_message("system", system)]
        self.turns: list[dict[str, str]] = []

    def encode(self, tokenizer: Tokenizer | None, text: str) -> list[int]:
        """Return the token ids of the conversation and one more user message, up to the reply's first token.

        Raises:
            ConfigError: The model has no tokenizer or no chat template.
        """
        return chat_ids(tokenizer, [*self._system, *self.turns, _message("user", text)])

    def add(self, text: str, reply: str) -> None:
        """Add a user message and its reply."""
        self.turns += [_message("user", text), _message("assistant", reply)]

    def clear(self) -> None:
        """Remove all messages but the system message."""
        self.turns = []

    def save(self, file: Path) -> None:
        """Write all messages to a JSON file, as `{"messages": [{"role": ..., "content": ...}, ...]}`.

        Raises:
            RequestError: The file cannot be written.
        """
        text = json.dumps({"messages": [*self._system, *self.turns]}, ensure_ascii=False, indent=2) + "\n"
        try:
            with replacing(file.resolve()) as new:
                new.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"{file} cannot be written ({error.strerror})", remedy="give another file"
            ) from error

    def load(self, file: Path) -> int:
        """Take the messages of a file that `save` wrote, the system message included, instead of these.

        Returns:
            The number of messages.

        Raises:
            RequestError: The file cannot be read, or holds no conversation. The messages then stay.
        """
        try:
            messages = _messages(json.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise RequestError(
                f"{file} cannot be read ({error.strerror})", remedy="give another file"
            ) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{file} holds no conversation", remedy="give one that was saved") from error
        first = sum(message["role"] == "system" for message in messages[:1])
        self._system, self.turns = messages[:first], messages[first:]
        return len(messages)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(document: Any) -> list[dict[str, str]]:
    """Return the messages of a document.

    Raises:
        ValueError: It has none.
    """
    found = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise ValueError("no messages")
    for message in found:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError("no message")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError("no message")
    return found
