"""A conversation -> the text that the model goes on from, by the template that the checkpoint carries.

Contract: the text is that of transformers' `apply_chat_template` for the same messages, and it already holds
the special tokens, so it is encoded without adding any. Templates (`template.py`) are given plain values only
(text, numbers, lists, objects), copies of the caller's, and what a message must have is theirs to say. What a
message says is not told apart from what the template says: a special token that is spelled out in a message
is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.config import read_json
from foredraft.model.template import Refusal, names_in, rendered

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]

FILE, MORE, CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
DEFAULT, TOOL_USE = "default", "tool_use"
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first that a message has counts
# Names that may be given to a template that does not read them.
STANDARD = {"tools", "documents", "add_generation_prompt", *SPECIAL}
# Options of `apply_chat_template` that no template gets to see, and what to do here.
NO_IDS = "padding return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs".split()
ELSEWHERE = dict.fromkeys(NO_IDS, "ids come as one list, so leave it out") | {
    "chat_template": f"put the template into the model's folder as {FILE}",
    "continue_final_message": "give generate the ids of encode_chat and of the reply's beginning, joined",
    "conversation": "its name is messages",
    "max_length": "a prompt that is too long is refused, unless generate gets truncate='left'",
    "sanitize_control_tokens": "it is not supported; take special tokens out of the messages",
    "truncation": "its name is truncate, and chat and generate take it",
}


class ChatTemplate:
    """The chat templates of a tokenizer, by name, and the special tokens that they may name.

    `DEFAULT` is used, or `TOOL_USE`, where there is one, for messages with tools.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The folder's templates: those in files of their own, else those in the tokenizer's config.

        None where there are none. Raises CheckpointError.
        """
        file = folder / CONFIG
        config = read_json(file) if file.is_file() else {}
        templates = _from_files(folder) or _from_config(config.get("chat_template"), file)
        return cls(templates, _special_tokens(folder, config)) if templates else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        messages: objects with a role, and with what else the template asks for, mostly content; a key whose
        value is None counts as left out. add_generation_prompt: end where the model's reply begins. tools,
        documents: descriptions, passed on to the template like all further variables, which it must read.
        Raises RequestError: a message or a variable cannot be passed on, or the template refuses the
        conversation or breaks.
        """
        for name in variables.keys() & ELSEWHERE.keys():
            raise RequestError(f"{name} is no variable of a chat template: {ELSEWHERE[name]}")
        given = variables | {"tools": tools, "documents": documents}
        values = {name: _plain(value, name) for name, value in given.items()}
        values |= {"messages": _checked(messages), "add_generation_prompt": bool(add_generation_prompt)}
        source = self._source(tools is not None)
        try:
            read = names_in(source)
            text = rendered(source, self.special_tokens | values)
        except Refusal as refusal:
            raise RequestError(f"the chat template refuses the messages: {_line(refusal)}") from None
        except Exception as error:  # a template computes whatever it likes
            raise RequestError(
                f"the chat template cannot be rendered with these messages ({_line(error)}); change them, or"
                f" give the model's folder another {FILE}"
            ) from error
        _check_variables(variables, read)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("a message is not valid Unicode; give text that can be UTF-8") from None
        return text

    def _source(self, with_tools: bool) -> str:
        if with_tools and TOOL_USE in self.templates:
            return self.templates[TOOL_USE]
        if DEFAULT not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise RequestError(
                f"the tokenizer has chat templates for {names} but none by default; put one into the model's"
                f" folder as {FILE}"
            )
        return self.templates[DEFAULT]


def _check_variables(given: Iterable[str], read: frozenset[str]) -> None:
    """That the template reads them: what it does not would be ignored."""
    for name in given:
        if name not in STANDARD | read:
            others = ", ".join(sorted(read - STANDARD - {"messages"})) or "only the standard ones"
            raise RequestError(f"the chat template does not read {name!r}; leave it out (it reads {others})")


def _from_files(folder: Path) -> dict[str, str]:
    files = {DEFAULT: folder / FILE} if (folder / FILE).is_file() else {}
    files |= {file.stem: file for file in sorted((folder / MORE).glob("*.jinja"))}
    try:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{folder} has a chat template that cannot be read ({error}); download it again"
        ) from error


def _from_config(found: Any, file: Path) -> dict[str, str]:
    """A config holds one template, or a list of them with their names."""
    if found is None:
        return {}
    listed = [{"name": DEFAULT, "template": found}] if isinstance(found, str) else found
    try:
        templates = {each["name"]: each["template"] for each in listed}
    except (TypeError, KeyError):
        templates = {}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair) or not templates:
        raise CheckpointError(
            f"{file}: chat_template is neither a template nor a list of named ones; download it again"
        )
    return templates


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts. A token may be an object that holds its text.

    A config that does not list the added tokens is older than the rule that all is in it: a file of their own
    has the last word then, as it has in transformers.
    """
    file = folder / "special_tokens_map.json"
    found = dict(config)
    if "added_tokens_decoder" not in config and file.is_file():
        found |= read_json(file)
    tokens = {name: found.get(name) for name in SPECIAL}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain values, without keys whose value is None."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages is not a list; give one, of objects with role and content")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    checked = []
    for number, message in enumerate(messages):
        at = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{at} is not an object; give one with role and content")
        plain = {key: value for key, value in _plain(message, at).items() if value is not None}
        if not isinstance(plain.get("role"), str):
            raise RequestError(f"{at} has no role that is text; give 'system', 'user' or 'assistant'")
        checked.append(_with_reasoning(plain))
    return checked


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under one of two names; people write it under any of three."""
    for name in REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _plain(value: Any, at: str) -> Any:
    """A copy in JSON's types (and tuples), so that a template gets no methods of anything else."""
    try:
        return _copied(value, at)
    except RecursionError:
        raise RequestError(f"{at} is nested too deeply, or holds itself; give plain JSON values") from None


def _copied(value: Any, at: str) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's member, say
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_copied(key, at): _copied(item, at) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item, at) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
        return _copied(number, at)
    raise RequestError(f"{at} holds a {type(value).__name__}; give text, numbers, lists and objects of these")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
