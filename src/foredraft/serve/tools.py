"""Tools of a chat: their part of the prompt, the grammar of calls, and the reader of calls.

A model writes calls as its chat template tells them: that way is found by a call that the template tells and
a reader reads. Where none reads it, or the template reads no tools, a system message describes them in the
way of Nous Research's Hermes. Calls are constrained to what the tool's schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field

from foredraft.constraints.grammar import check_grammar
from foredraft.errors import RequestError, shortened
from foredraft.model.chat import ChatTemplate
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.call_formats import FORMATS, HERMES, ID_LENGTH, CallFormat
from foredraft.serve.call_grammar import CallGrammar, unheld
from foredraft.serve.calls import CallReader, ParsedToolCall, parsed_object
from foredraft.serve.forms import Messages, chat_text, spelled_out
from foredraft.serve.problems import invalid
from foredraft.serve.schemas import Fitted, broken, fit

MAX_TOOLS = 128
MAX_PLACES = 5  # of a schema that an error names
EMPTY = {"type": "object", "properties": {}}  # what templates show of a tool without parameters
NO_PARAMETERS = {**EMPTY, "additionalProperties": False}
SYSTEM = """You may call one or more functions. Their signatures are between <tools> and </tools>:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


class Function(BaseModel, extra="ignore", strict=True):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")  # OpenAI's have 64 at most, Anthropic's 128
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel, extra="ignore", strict=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel, extra="forbid", strict=True):
    name: str


class NamedChoice(BaseModel, extra="forbid", strict=True):
    """The one function to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(BaseModel, extra="ignore", strict=True):
    """Those of the tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1)


class AllowedChoice(BaseModel, extra="forbid", strict=True):
    """A choice of some of the tools; the model sees the others, too."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class Tools:
    functions: tuple[Function, ...]  # all that the prompt describes
    callable: tuple[Function, ...]  # those that may be called
    schemas: Mapping[str, Fitted]  # of their arguments by name, as the grammar holds them
    required: bool  # the text is calls and nothing else
    parallel: bool  # several calls are allowed
    format: CallFormat  # how the model writes calls
    described: bool  # the chat template describes the functions
    special: Mapping[str, int]  # ids of the special tokens that calls are written with, by their texts

    @classmethod
    def of(
        cls, tools: list[Tool] | None, choice: Any, parallel: bool | None, tokenizer: Tokenizer
    ) -> Tools | None:
        """Return the tools of a request; None where it has none, or none may be called."""
        if not tools or tokenizer.chat is None:
            if choice not in (None, "none", "auto"):
                raise invalid("tool_choice", "tool_choice needs tools")
            return None
        functions = tuple(tool.function for tool in tools)
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise invalid("tools", "two tools have the same name")
        if choice == "none":
            return None
        chosen, required = functions, choice not in (None, "auto")
        if isinstance(choice, NamedChoice):
            chosen = _named(functions, [choice])
        if isinstance(choice, AllowedChoice):
            chosen = _named(functions, choice.allowed_tools.tools)
            required = choice.allowed_tools.mode == "required"
        written = written_by(tokenizer)
        found = cls(
            functions, chosen, {each.name: _fitted(each) for each in chosen}, required=required,
            parallel=parallel is not False and not isinstance(choice, NamedChoice),
            format=written or HERMES, described=written is not None, special=special_in(written, tokenizer),
        )  # fmt: skip
        for each in chosen:
            if each.strict:
                check_held(f"the tool {each.name!r}", found._left_out(each.name), "tools")
        return found

    def reader(self) -> CallReader:
        schemas = {name: each.schema for name, each in self.schemas.items()}
        return CallReader(self.format, schemas, None if self.parallel else 1)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The keywords that the grammar does not hold, each with its tool and its place in the schema."""
        return tuple(f"{name}: {place}" for name in self.schemas for place in self._left_out(name))

    def _left_out(self, name: str) -> list[str]:
        fitted = self.schemas[name]
        return list(dict.fromkeys([*fitted.left_out, *unheld(self.format, fitted.schema)]))

    def broken(self, call: ParsedToolCall) -> list[str]:
        """Return the places of the keywords that a call's arguments break, of those that no grammar holds."""
        if call.name not in self.schemas or not self._left_out(call.name):
            return []
        found = broken(self.schemas[call.name].whole, call.arguments)
        return [f"{call.name}: {place}" for place in found]

    def prompt(self, messages: Messages) -> tuple[Messages, dict[str, Any]]:
        """Return the messages and the further variables for the chat template."""
        listed = []
        for function in self.functions:
            shown = function.model_dump(exclude_none=True, exclude={"strict"})
            shown["parameters"] = function.parameters or EMPTY
            listed.append({"type": "function", "function": shown})
        if self.described:
            return messages, {"tools": listed}
        messages = spelled_out(messages)
        text = SYSTEM.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in listed))
        if messages and messages[0].get("role") == "system":
            text = f"{messages[0].get('content') or ''}\n\n{text}".lstrip()
            messages = messages[1:]
        return [{"role": "system", "content": text}, *messages], {}

    def constrain(self, options: dict[str, Any], field: str | None) -> None:
        """Put the grammar of calls into the library's options; an answer without calls keeps its own schema.

        `field` gives the form of the text, if any does.
        """
        for name in ("regex", "choices", "grammar"):
            if name in options:
                raise invalid(field or name, f"{field or name} cannot hold together with tools")
        schema = {"type": "object"} if options.pop("json_object", False) else options.pop("json_schema", None)
        try:
            grammar = self.grammar(schema)
        except RecursionError:
            raise invalid("tools", "the parameters of a tool are nested too deeply") from None
        if grammar is not None:
            try:
                check_grammar("grammar", grammar)
            except RequestError:  # each tool by itself is good
                says = "the tools are too many, or their schemas too large together; give fewer"
                raise invalid("tools", says) from None
            options["grammar"] = grammar
        elif schema is not None:
            field = field or "response_format"
            raise invalid(field, f"{field} cannot hold together with this model's tools")

    def grammar(self, schema: Mapping[str, Any] | None) -> str | None:
        """Return the grammar of the text in llguidance's dialect; None where there is none.

        An answer and a call that both begin as a JSON object cannot be told apart by the library.
        """
        if not self.required and schema is not None and not self.format.marker:
            return None
        schemas = {name: each.schema for name, each in self.schemas.items()}
        grammar = CallGrammar(self.format, schemas, self.special, parallel=self.parallel)
        return grammar.whole(required=self.required, answer=schema)


# What a template tells, for the way in which it does: two turns of a conversation, and the call between them.
ASKED, ANSWERED, CALLED = "foredraftasked", "foredraftanswered", ("foredraftcall", {"at": "foredraftgiven"})
# The ways that were found, which take a few milliseconds.
_found: WeakKeyDictionary[ChatTemplate, CallFormat | None] = WeakKeyDictionary()


def written_by(tokenizer: Tokenizer) -> CallFormat | None:
    """Return the way in which a chat template tells calls; None where none is known, or it reads no tools."""
    chat = tokenizer.chat
    if chat is None or not chat.reads_tools:
        return None
    if chat not in _found:
        _found[chat] = _written_by(tokenizer)
    return _found[chat]


def _written_by(tokenizer: Tokenizer) -> CallFormat | None:
    name, arguments = CALLED
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    function = {"name": name, "description": name, "parameters": schema}
    call = {"id": name[:ID_LENGTH], "type": "function", "function": {"name": name, "arguments": arguments}}
    asked: Messages = [{"role": "user", "content": ASKED}]
    turns: Messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": ANSWERED},
    ]
    variables = {"tools": [{"type": "function", "function": function}]}
    try:
        prompt = chat_text(tokenizer, asked, variables)
        text = chat_text(tokenizer, asked + turns, {**variables, "add_generation_prompt": False})
    except RequestError:
        return None
    begin = len(prompt) if text.startswith(prompt) else text.find(ASKED) + len(ASKED)
    told = text[begin : text.find(ANSWERED)]
    read = [format for format in FORMATS if format.id in told and _reads(format, told, name, arguments)]
    exact = (format for format in read if format.write(name, arguments) in told)
    return next(exact, next(iter(read), None))


def _reads(format: CallFormat, text: str, name: str, arguments: dict[str, str]) -> bool:
    reader = CallReader(format, {name: {}})
    reader.read(text)
    reader.end()
    return [(call.name, parsed_object(call.arguments)) for call in reader.calls] == [(name, arguments)]


def special_in(format: CallFormat | None, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens that calls are written with, which a text shows although they are special."""
    if format is None:
        return {}
    written = "\n".join([format.first, format.write("", {"": ""}), format.between, format.last, format.id])
    texts = {tokenizer.inner.id_to_token(id): id for id in tokenizer.special}
    return {text: id for text, id in texts.items() if text and text in written}


def _named(functions: tuple[Function, ...], choices: list[NamedChoice]) -> tuple[Function, ...]:
    """Return the functions that choices name, in their own order."""
    names = [choice.function.name for choice in choices]
    if unknown := [name for name in names if name not in {each.name for each in functions}]:
        raise invalid("tool_choice", f"tool_choice names {shortened(unknown[0])}, which is no tool")
    return tuple(each for each in functions if each.name in names)


def _fitted(function: Function) -> Fitted:
    given = function.parameters or NO_PARAMETERS
    return fitted_schema(f"the tool {function.name!r}", given, "tools", strict=function.strict, close=True)


def fitted_schema(
    subject: str, schema: dict[str, Any], param: str, *, strict: bool | None, close: bool | None
) -> Fitted:
    try:
        fitted = fit(schema, close=bool(close))
    except RequestError as error:
        raise invalid(param, f"the schema of {subject} {error}") from None
    except RecursionError:
        raise invalid(param, f"the schema of {subject} is nested too deeply") from None
    if strict:
        check_held(subject, fitted.left_out, param)
    return fitted


def check_held(subject: str, left_out: Sequence[str], param: str) -> None:
    """Raise Problem unless the grammar of something strict holds its whole schema."""
    if left_out:
        places = ", ".join(left_out[:MAX_PLACES])
        says = f"{subject} is strict, but its schema has what is not supported: {places}"
        raise invalid(param, f"{says}; leave that out, or strict")
