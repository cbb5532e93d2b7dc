"""A conversation -> the text that the model goes on from, by the template that the checkpoint carries.

Contract: the text is that of transformers' `apply_chat_template` for the same messages, and it already holds
the special tokens, so it is encoded without adding any. Templates are Jinja programs of whoever made the
checkpoint: they run in Jinja's immutable sandbox and are given plain values only (text, numbers, lists,
objects), copies of the caller's. What a message says is not told apart from what the template says: a special
token that is spelled out in a message is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser

from foredraft.errors import CheckpointError, RequestError
from foredraft.model.config import read_json

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]

FILE, MORE, CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
DEFAULT, TOOL_USE = "default", "tool_use"


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

        messages: objects with a role, and with content (text or a list of parts) or tool_calls; a key whose
        value is None counts as left out. add_generation_prompt: end where the model's reply begins. tools,
        documents: descriptions, passed on to the template like all further variables.
        Raises RequestError: a message is malformed, or the template refuses the conversation or breaks.
        """
        given = variables | {"tools": tools, "documents": documents}
        values = {name: _plain(value, name) for name, value in given.items()}
        checked = _checked(messages)
        source = self._source(tools is not None)
        try:
            text = _compiled(source).render(
                self.special_tokens
                | values
                | {"messages": checked, "add_generation_prompt": bool(add_generation_prompt)}
            )
        except Refusal as refusal:
            raise RequestError(f"the chat template refuses the messages: {_line(refusal)}") from None
        except Exception as error:  # a template computes whatever it likes
            raise RequestError(
                f"the chat template cannot be rendered with these messages ({_line(error)}); change them, or"
                f" give the model's folder another {FILE}"
            ) from error
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


class Refusal(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


class Generation(ext.Extension):
    """`{% generation %}`, with which templates mark a model's own words for training: a plain block here."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _compiled(source: str) -> jinja2.Template:
    """As transformers compiles it: its settings, and the names that it offers."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML cannot hold."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


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
        if not isinstance(plain.get("content", ""), str | list):
            raise RequestError(
                f"{at} has content that is neither text nor a list of parts; give one of these"
            )
        if "content" not in plain and "tool_calls" not in plain:
            raise RequestError(f"{at} has no content; give text")
        checked.append(plain)
    return checked


def _plain(value: Any, at: str) -> Any:
    """A copy in JSON's types, so that a template gets no methods of anything else."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's member, say
    if isinstance(value, Mapping):
        return {_plain(key, at): _plain(item, at) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, at) for item in value]
    raise RequestError(f"{at} holds a {type(value).__name__}; give text, numbers, lists and objects of these")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
