"""Turn a conversation into the prompt text, by the checkpoint's chat template.

Contract: the text equals that of transformers' `apply_chat_template` for the same messages, and is cut in the
same place where the last message is to be continued. It already holds the special tokens, so it is encoded
without adding any. A template (`template.py`) receives copies of plain values only (text, numbers, lists,
objects), and decides itself which keys a message must have. A message that spells out a special token
contains that token. Templates of multimodal checkpoints read parts such as {"type": "text", "text": ...}. One
that would leave a plain text out without a word gets texts as lists of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.errors import Option, RequestError, Text, did_you_mean, invalid_at
from foredraft.files import TEXT
from foredraft.model.config import broken, read_json

# A content that a template is to read as null; one that is None is left out, as if it were not there.
NULL = object()
PROBE = "foredraftprobe"  # a word that survives what templates do to a message


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


Message = Mapping[str, Any]  # one message: "role", and the other keys that the template reads

FILE, NAMED_FOLDER, CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SPECIAL_TOKENS = "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
# keys for a message's reasoning; the first one present counts
REASONING = ("reasoning_content", "thinking", "reasoning")
# Variables that a template may leave unread without an error.
STANDARD = {"add_generation_prompt", *SPECIAL}
LISTS = {"tools", "documents"}  # refused where they hold something that the template does not read
# Options of `apply_chat_template` that are not template variables, with the remedy for each.
FORMATS = "padding return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs".split()
NOT_VARIABLES: dict[str, Text] = {
    **dict.fromkeys(FORMATS, "the ids are always one list, so leave it out"),
    "chat_template": f"put the template into the model's folder as {FILE}",
    "conversation": "its name is messages",
    "max_length": ("a prompt that is too long is refused, or shortened with ", Option("truncate", "left")),
    "sanitize_control_tokens": "it is not supported, so remove special tokens from the messages",
    "truncation": ("its name is ", Option("truncate"), ", an option of chat and generate"),
}


# Marks the end of a message that is continued. A template that keeps the space behind the word keeps the
# spaces before it, too (https://huggingface.co/docs/transformers/chat_templating#continuefinalmessage).
END = "FOREDRAFT_CONTINUES_HERE "


class ChatTemplate:
    """The chat templates of a tokenizer.

    The template named "default" is used; messages with tools use the one named "tool_use" if there is one.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = dict(templates)  # Jinja sources by name
        # texts of the special tokens, by the names that templates use, as in "bos_token"
        self.special_tokens = dict(special_tokens or {})
        self._in_parts: dict[str, bool] = {}  # template -> whether it takes texts as parts alone

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Return the templates of a checkpoint: from their own files, or else from tokenizer_config.json."""
        file = folder / CONFIG
        config = read_json(file) if file.is_file() else {}
        files = {DEFAULT: folder / FILE} if (folder / FILE).is_file() else {}
        files |= {file.stem: file for file in sorted((folder / NAMED_FOLDER).glob("*.jinja"))}
        if not files and config.get("chat_template") is None:
            return None
        tokens = config
        # Older checkpoints list no added tokens in the config. For them special_tokens_map.json overrides it,
        # as in transformers.
        if "added_tokens_decoder" not in config and (folder / SPECIAL_TOKENS).is_file():
            tokens = config | read_json(folder / SPECIAL_TOKENS)
        try:
            templates = {name: file.read_text(encoding=TEXT) for name, file in files.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise broken(f"{folder} has a chat template that cannot be read ({error})") from error
        return cls(templates, _texts(tokens)) if templates else cls.from_config(config, file, tokens)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], where: Path, tokens: Mapping[str, Any] | None = None
    ) -> ChatTemplate | None:
        """Return the templates of a tokenizer_config.json: one, or a list of named ones."""
        found = config.get("chat_template")
        if found is None:
            return None
        listed = [{"name": DEFAULT, "template": found}] if isinstance(found, str) else found
        try:
            templates = {each["name"]: each["template"] for each in listed}
        except (TypeError, KeyError):
            templates = {}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair) or not templates:
            raise broken(f"{where}: chat_template is neither a template nor a list of named templates")
        return cls(templates, _texts(config if tokens is None else tokens))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation."""
        # Here and below, not above: Jinja takes a while to import, and most runs need none.
        from foredraft.model.template import Refusal, render, variables_of

        for name in variables.keys() & NOT_VARIABLES.keys():
            raise RequestError(f"{name} is not a variable of a chat template", remedy=NOT_VARIABLES[name])
        given = variables | {"tools": tools, "documents": documents}
        values = {name: _plain(value, name) for name, value in given.items()}
        plain, begun = _checked(messages), ""
        source = self.source(with_tools=tools is not None)
        if self._takes_parts_alone(source):
            for message in plain:
                if isinstance(message.get("content"), str):
                    message["content"] = _parts(message["content"])
        if continue_final_message:
            plain, begun = _marked(plain)
        append = bool(add_generation_prompt) and not continue_final_message
        values |= {"messages": plain, "add_generation_prompt": append}
        try:
            read = variables_of(source)
            text = render(source, self.special_tokens | values)
        except Refusal as refusal:
            raise RequestError(f"the chat template refuses the messages: {_line(refusal)}") from None
        except Exception as error:  # the expressions of a template may raise anything
            raise RequestError(
                f"the chat template cannot be rendered with these messages ({_line(error)})",
                remedy=f"change the messages, or put another {FILE} into the model's folder",
            ) from error
        # tools have chosen a template of their own
        chosen = {"tools"} if TOOL_USE in self.templates else set()
        for name in [*variables, *(name for name in LISTS - chosen if given[name])]:
            if name not in STANDARD | read:  # the template would ignore it
                others = sorted(read - STANDARD - LISTS - {"messages"})
                shown = ", ".join(others) or "only the standard ones"
                remedy = f"leave it out (it reads {shown}){did_you_mean(name, others)}"
                raise RequestError(f"the chat template does not read {name!r}", remedy=remedy)
        if invalid_at(text) is not None:
            remedy = "give text that can be encoded as UTF-8"
            raise RequestError("a message is not valid Unicode", remedy=remedy)
        return _cut(text, begun, source) if continue_final_message else text

    def _takes_parts_alone(self, source: str) -> bool:
        """Return whether a template shows a text only where it is given as a list of parts."""
        if "text" not in source:  # the key of a part
            return False
        if source not in self._in_parts:
            from foredraft.model.template import render

            values = self.special_tokens | {"add_generation_prompt": True, "tools": None, "documents": None}

            def shows(content: Any) -> bool:
                try:
                    messages = [{"role": "user", "content": content}]
                    return PROBE in render(source, values | {"messages": messages})
                except Exception:  # the expressions of a template may raise anything
                    return False

            self._in_parts[source] = not shows(PROBE) and shows(_parts(PROBE))
        return self._in_parts[source]

    @property
    def reads_tools(self) -> bool:
        """Whether the template for messages with tools reads them."""
        return "tools" in self.variables(with_tools=True)

    def variables(self, *, with_tools: bool) -> frozenset[str]:
        """Return the variables that the template for messages with or without tools reads."""
        from foredraft.model.template import variables_of

        try:
            return variables_of(self.source(with_tools=with_tools))
        except Exception:  # a malformed template; `render` says so
            return frozenset()

    def unread(self, names: Iterable[str], *, with_tools: bool) -> list[str]:
        """Return those names of variables that the template does not read, so that they have no effect."""
        known = STANDARD | LISTS | NOT_VARIABLES.keys() | self.variables(with_tools=with_tools)
        return [name for name in names if name not in known]

    def source(self, *, with_tools: bool) -> str:
        """Return the template for messages with or without tools."""
        if with_tools and TOOL_USE in self.templates:
            return self.templates[TOOL_USE]
        if DEFAULT not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise RequestError(
                f"the tokenizer has chat templates named {names}, but none named default",
                remedy=f"put one into the model's folder as {FILE}",
            )
        return self.templates[DEFAULT]


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by name; a token may be an object that holds its text."""
    tokens = {name: config.get(name) for name in SPECIAL}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as plain values, without keys whose value is None."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages is not a list", remedy="give a list of objects with role and content")
    if not messages:
        raise RequestError("messages is empty", remedy="give at least one message")
    checked = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{name} is not an object", remedy="give an object with role and content")
        null = message.get("content") is NULL
        given = _plain({**message, "content": None} if null else message, name)
        plain = {
            key: value for key, value in given.items() if value is not None or (null and key == "content")
        }
        if not isinstance(plain.get("role"), str):
            remedy = "give 'system', 'user' or 'assistant'"
            raise RequestError(f"{name} has no role that is text", remedy=remedy)
        if key := next(filter(plain.__contains__, REASONING), None):  # templates read it under two keys
            plain = {"thinking": plain[key], **plain, "reasoning_content": plain[key]}
        checked.append(plain)
    return checked


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return messages whose last one has a mark at the end of its content, and its text before the mark."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + END}], content
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and isinstance(parts[at].get("text"), str):
            text = parts[at]["text"]
            parts[at] = {**parts[at], "text": text + END}
            return [*before, {**last, "content": parts}], text
    raise RequestError(
        "needs a last message whose content is text", option="continue_final_message",
        remedy="give one, or leave the option out",
    )  # fmt: skip


def _cut(text: str, begun: str, source: str) -> str:
    """Return a text up to the mark in it; without the spaces before it where the template trims them."""
    word = END.strip()
    if "content" not in source or word not in text or begun.strip() not in text:
        raise RequestError(
            "needs a chat template that shows the last message as it is", option="continue_final_message",
            remedy="change the message, or leave the option out",
        )  # fmt: skip
    at = text.rindex(word)
    return text[:at] if text.startswith(END, at) else text[:at].rstrip()


def _plain(value: Any, name: str) -> Any:
    """Return a copy made of JSON's types and tuples, so that a template cannot call other methods."""
    try:
        return _copied(value, name)
    except RecursionError:
        problem = f"{name} is nested too deeply, or contains itself"
        raise RequestError(problem, remedy="give plain JSON values") from None


EXACT: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _copied(value: Any, name: str) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    for kind, exact in EXACT.items():
        if isinstance(value, kind):  # a member of an enumeration, for one
            return exact(value)
    if isinstance(value, Mapping):
        return {_copied(key, name): _copied(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item, name) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
        return _copied(number, name)
    remedy = "give text, numbers, and lists and objects of these"
    raise RequestError(f"{name} holds a {type(value).__name__}", remedy=remedy)


def _line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
