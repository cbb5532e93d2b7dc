"""Prompt form: how the prompts of a measurement become token ids, as they are or as messages of a chat.

An instruct model is used through its chat template. A plan, a drafter or a figure that was found on raw
prompts says little about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.errors import ConfigError, Option
from foredraft.unicode import invalid_at

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer

__all__ = ["AS_IT_IS", "PromptForm", "chat_ids"]


def chat_ids(tokenizer: Tokenizer | None, messages: list[Mapping[str, str]]) -> list[int]:
    """Return the token ids of a conversation, up to the reply's first token.

    Raises:
        ConfigError: The model has no tokenizer or no chat template.
        RequestError: The template refuses the messages.
    """
    if tokenizer is None:
        raise ConfigError(
            "needs a tokenizer, but the model's folder has no tokenizer.json",
            option="chat",
            remedy="add the file, or leave the option out",
        )
    if tokenizer.chat is None:
        raise ConfigError(
            "needs a chat template, but the model has none",
            option="chat",
            remedy=("leave it out, or give ", Option("model"), " a model trained for chat"),
        )
    return tokenizer.encode_chat(messages)


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How prompts become token ids.

    Attributes:
        chat: Each prompt is a user message in the model's chat template.
        system: The system message before it; None for none.

    Raises:
        ConfigError: There is a system message but no chat, or it is not valid text.
    """

    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.system is None:
            return
        if not self.chat:
            raise ConfigError(
                ("has no effect without ", Option("chat")),
                option="system",
                remedy=("add ", Option("chat"), ", or leave it out"),
            )
        if (at := invalid_at(self.system)) is not None:
            raise ConfigError(
                f"the system message is not UTF-8 text (character {at})", remedy="convert it first"
            )

    def applied(self, tokenizer: Tokenizer | None, prompts: Sequence[str]) -> Sequence[str] | list[list[int]]:
        """Return the prompts as requests take them: the token ids of chats, or the texts as they are.

        Raises:
            ConfigError: The model has no tokenizer or no chat template.
            RequestError: The template refuses a prompt.
        """
        if not self.chat:
            return prompts
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [chat_ids(tokenizer, [*before, {"role": "user", "content": text}]) for text in prompts]

    def longest(self, tokenizer: Tokenizer, prompts: Sequence[str]) -> int:
        """Return the tokens of the longest prompt; raises as `applied`."""
        applied = self.applied(tokenizer, prompts)
        return max(len(tokenizer.encode(each) if isinstance(each, str) else each) for each in applied)


AS_IT_IS = PromptForm()
