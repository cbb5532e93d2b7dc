"""Requests: the bodies of the API, their types, and what they mean to the library.

A field that would change the output is honoured or refused by name. A field that changes nothing here, such
as `user`, is taken; an unknown one is ignored, and the response lists it in the header `x-ignored-fields`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, create_model

from foredraft.arguments import declared, spelled_elsewhere
from foredraft.arguments.values import Choice, Flag, Number, Strings, Value, Whole
from foredraft.constraints.compiling import check_grammar
from foredraft.decode.params import SamplingKeywords, SamplingParams
from foredraft.decode.thinking import Thinking
from foredraft.errors import RequestError, shortened
from foredraft.llm import LLM
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.beside import without_collection
from foredraft.serve.conversation import Messages, fitted, messages_of, spelled_out, text_of
from foredraft.serve.problems import FIELDS, Problem
from foredraft.serve.schemas import Fitted
from foredraft.serve.thinking import template_variables, thinking_after
from foredraft.serve.tools import MAX_TOOLS, Tool, ToolChoice, Tools, fitted_schema

__all__ = ["Body", "ChatRequest", "CompletionRequest", "Further", "Items", "Job", "check_model"]

MAX_SAMPLES = 128  # of a prompt, as in the API
MAX_LOGPROBS = 20  # alternatives to a token, as in the API
T = TypeVar("T")
# A list whose first wrong item ends the check: a million errors would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
# Fields that change nothing here.
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity"
    " reasoning_effort parallel_tool_calls request_id priority".split()
)
# Fields that would change the output and are not supported; a value that says "off" is taken.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "best_of": (None, 1), "tools": (None, []), "tool_choice": (None, "none", "auto"),
    "functions": (None, []), "function_call": (None, "none", "auto"), "audio": (None,),
    "modalities": (None, ["text"]), "web_search_options": (None,), "stop_token_ids": (None, []),
    "logits_processors": (None, []), "use_beam_search": (None, False), "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False), "allowed_token_ids": (None, []),
    "bad_words": (None, []), "guided_choice": (None,), "guided_json": (None,), "guided_regex": (None,),
    "guided_grammar": (None,), "structured_outputs": (None,), "dimensions": (None,),
    "prompt": (None,), "echo": (None, False), "messages": (None,), "max_completion_tokens": (None,),
    "top_logprobs": (None, 0), "chat_template_kwargs": (None, {}), "chat_template": (None,),
    "add_generation_prompt": (None, True), "continue_final_message": (None, False), "documents": (None, []),
    "add_special_tokens": (None,), "banned_strings": (None, [], ""), "prompt_logprobs": (None, False),
    "truncate_prompt_tokens": (None,), "min_new_tokens": (None, 0), "max_new_tokens": (None,),
    "repeat_penalty": (None, 1, 1.0), "json_schema": (None,), "json_object": (None, False),
}  # fmt: skip
# Options of the library that requests have in another form, or not at all.
OTHER_FORM = {
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "choices",
    "json_schema",
    "json_object",
    "prediction",
}
# Further options of the library -> fields of requests. They have the same values.
SHARED = {name: FIELDS.get(name, name) for name in declared(SamplingParams) if name not in OTHER_FORM}
CLASS_NAME = re.compile(r" or instance of \w+$")  # at the end of what pydantic says of an object
INSTEAD = {
    **{name: f"its name is {field}" for name, field in SHARED.items() if name != field},
    **{
        name: f"its name is {SHARED[here]}"
        for name, here in spelled_elsewhere(SamplingParams).items()
        if here in SHARED
    },
    "best_of": "ask for n samples with logprobs",
    "guided_json": "its name is response_format",
    "functions": "its name is tools", "function_call": "its name is tool_choice",
    "structured_outputs": "give response_format, regex or grammar",
    "prompt": "it is a field of /v1/completions", "echo": "it is a field of /v1/completions",
    "messages": "it is a field of /v1/chat/completions",
    "max_completion_tokens": "its name here is max_tokens",
    "top_logprobs": "give their number as logprobs",
    "prompt_logprobs": "give echo and logprobs to /v1/completions",
    "truncate_prompt_tokens": 'give truncate_prompt "left"',
    "json_schema": "its name is response_format", "json_object": "its name is response_format",
}  # fmt: skip


class StreamOptions(BaseModel):
    """What a stream sends beside its text."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(BaseModel):
    """What the text will probably be."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["content"]
    content: str | Items[dict[str, Any]]

    @property
    def text(self) -> str:
        return text_of(self.content, "prediction.content", "prediction")


class Body(BaseModel):
    """The base of all bodies. Fields that it does not declare are kept, and judged by three tables.

    Attributes:
        harmless: Fields that change nothing here.
        unsupported: Fields that would change the output, with the values that leave it as it is.
        instead: What to do instead of some of them.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    harmless: ClassVar[frozenset[str]]
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]]
    instead: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def read(cls, body: object) -> Self:
        """Return a body with its types checked.

        Raises:
            Problem: It is no object, lacks a field, or a field has another type.
        """
        try:
            with without_collection():
                return cls.model_validate(body)
        except ValidationError as error:
            raise _first(error, body) from None

    def refuse_unsupported(self) -> None:
        """Raise Problem for the first field that is not supported."""
        for name, off in self.unsupported.items():
            if (self.model_extra or {}).get(name) not in off:
                message = f"{name} is not supported; {self.instead.get(name, 'leave it out')}"
                raise Problem(400, message, param=name, code="unsupported_parameter")

    @property
    def further(self) -> dict[str, Any]:
        """The fields that no table knows."""
        known = self.harmless | self.unsupported.keys()
        return {name: value for name, value in (self.model_extra or {}).items() if name not in known}


def _json_type(value: Value) -> Any:
    """Return the type in JSON of the values of an option."""
    match value:
        case Flag():
            return bool
        case Whole():
            return int
        case Number():
            return float
        case Choice(names=names):
            return Literal[tuple(names)]
        case Strings():
            return str | Items[str]
    return str


if TYPE_CHECKING:
    _Sampling: TypeAlias = Body
else:
    _Sampling = create_model(
        "_Sampling",
        __base__=Body,
        **{
            field: (_json_type(declared(SamplingParams)[name].value) | None, None)
            for name, field in SHARED.items()
        },
    )


class _Request(_Sampling):
    """The fields of both kinds of request, beside those that the library's options make."""

    harmless, unsupported, instead = HARMLESS, UNSUPPORTED, INSTEAD
    model: str
    logit_bias: dict[str, float] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    truncate_prompt: Literal["left"] | None = None
    skip_special_tokens: bool | None = None
    provenance: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @property
    def shared(self) -> dict[str, Any]:
        """The options of the library that are given with the library's own values."""
        given = {name: getattr(self, field) for name, field in SHARED.items()}
        return {name: value for name, value in given.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """Return the options of the library but for the scores."""
        options = self.shared
        if self.logit_bias:
            options["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if self.prediction is not None:
            options["prediction"] = self.prediction.text
        form = self.response_format
        if form is not None and form.type == "json_object":
            options["json_object"] = True
        if form is not None and form.type == "json_schema":
            if self.answer is None:
                raise Problem(400, "response_format.json_schema.schema is missing", param="response_format")
            options["json_schema"] = self.answer.schema
        return options

    @property
    def answer(self) -> Fitted | None:
        """The schema of the text, as a grammar holds it; None where the request has none."""
        given = self.response_format
        form = None if given is None or given.type != "json_schema" else given.json_schema
        if form is None or form.schema_ is None:
            return None
        return fitted_schema(
            "the answer", form.schema_, "response_format", strict=form.strict, close=form.strict
        )


@dataclass(frozen=True, slots=True)
class Further:
    """What a request in another shape of the API asks for beyond the fields of a chat.

    Attributes:
        cuts_length: As many new tokens as there is room for, where it asks for more.
        thinks: Whether the reply begins with reasoning, for templates that can choose; None leaves it open.
        ignored_tools: Tools that the server has no use for.
    """

    cuts_length: bool = False
    thinks: bool | None = None
    ignored_tools: tuple[str, ...] = ()


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    prompts: ClassVar[int] = 1
    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    stop_in_reasoning: bool | None = None
    _beyond: Further = PrivateAttr(default=Further())

    @classmethod
    def of(cls, body: dict[str, Any], beyond: Further) -> ChatRequest:
        """Return the chat of a request in another shape; arguments and errors as `read`."""
        request = cls.read(body)
        request._beyond = beyond
        return request

    @property
    def beyond(self) -> Further:
        """What the request asks for beyond these fields."""
        return self._beyond


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> int:
        """How many prompts it has; at least 1, though a list may be empty."""
        whole = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), 0), int)
        return 1 if whole else len(self.prompt)


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the library understands it.

    Attributes:
        prompts: Token ids.
        params: The same for all prompts.
        n: Samples of each prompt.
        echo: The reply begins with the prompt.
        stream: The reply is streamed.
        include_usage: A stream ends with the usage.
        continuous_usage: Each part of a stream has the usage so far.
        truncate: As in `LLM.generate`.
        show_special: As in `LLM.generate`.
        provenance: The reply has the source of each token.
        tools: That the reply may call.
        thinking: How the reply marks its reasoning; None where it has none.
        ignored: Names of unknown fields, and of variables that the chat template does not read.
        ignored_tools: Tools that the model does not see.
        unenforced: Places of keywords of schemas that no grammar holds.
    """

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    truncate: Literal["left"] | None = None
    show_special: bool = False
    provenance: bool = False
    tools: Tools | None = None
    thinking: Thinking | None = None
    ignored: tuple[str, ...] = ()
    ignored_tools: tuple[str, ...] = ()
    unenforced: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        return self.n * len(self.prompts)

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, llm: LLM, names: tuple[str, ...]) -> Job:
        """Read a request; it may take long for long prompts.

        Raises:
            Problem: The model is another, or a field is not supported.
            RequestError: A value cannot be honoured.
        """
        check_model(request.model, names)
        request.refuse_unsupported()
        options = request.options()
        read = _read_chat if isinstance(request, ChatRequest) else _read_completion
        found = read(cast(Any, request), llm, options)
        params = llm.params(**cast(SamplingKeywords, options))
        if request.stream_options is not None and not request.stream:
            raise Problem(400, "stream_options needs stream", param="stream_options")
        stream_options = request.stream_options or StreamOptions()
        return cls(
            found.prompts, params,
            n=1 if request.n is None else request.n,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            stream=bool(request.stream),
            include_usage=bool(stream_options.include_usage),
            continuous_usage=bool(stream_options.continuous_usage_stats),
            truncate=request.truncate_prompt,
            show_special=request.skip_special_tokens is False,
            provenance=bool(request.provenance),
            tools=found.tools,
            thinking=found.thinking,
            ignored=tuple(sorted([*request.further, *found.unread])),
            ignored_tools=request.beyond.ignored_tools if isinstance(request, ChatRequest) else (),
            unenforced=(
                *(() if found.tools is None else found.tools.unenforced),
                *(() if request.answer is None else request.answer.left_out),
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Read:
    """What the messages or the prompts of a request mean; the fields are those of `Job`."""

    prompts: list[list[int]]
    tools: Tools | None = None
    thinking: Thinking | None = None
    unread: Collection[str] = ()


def check_model(name: str, names: tuple[str, ...]) -> None:
    """Check that a request names this server's model.

    Raises:
        Problem: It names another one.
    """
    if name not in names:
        raise Problem(
            404, f"the model {shortened(name)} does not exist; this server has {names[0]!r}",
            param="model", code="model_not_found",
        )  # fmt: skip


def _first(error: ValidationError, body: object) -> Problem:
    """Return the first wrong field of a body as a problem that names it by its path.

    A value that may have one of several types has an error for each of them; the one that lies deepest tells
    the most.
    """
    errors = error.errors(include_url=False, include_input=False)
    found = [(_path(each["loc"], body, missing=each["type"] == "missing"), each["msg"]) for each in errors]
    path, message = max(
        (each for each in found if each[0][:1] == found[0][0][:1]), key=lambda each: len(each[0])
    )
    says = CLASS_NAME.sub("", message)
    return Problem(400, f"{'.'.join(path) or 'the body'}: {says}", param=path[0] if path else None)


def _path(parts: tuple[int | str, ...], body: object, *, missing: bool) -> list[str]:
    """Return those parts of an error's path that lead through a body; pydantic's have names of types, too.

    Args:
        parts: The path.
        body: The body.
        missing: The last part is not in the body.
    """
    path, value = [], cast(Any, body)
    for part in parts[:-1] if missing else parts:
        known = range(len(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else ()
        if part in known:
            value = value[part]
            path.append(str(part))
    return [*path, str(parts[-1])] if missing else path


def _read_chat(request: ChatRequest, llm: LLM, options: dict[str, Any]) -> _Read:
    """Return the prompt and the tools, and add the length, the scores and the form of calls to `options`."""
    if llm.tokenizer is None:
        raise Problem(
            400, "this model has no tokenizer; use /v1/completions with token ids", param="messages"
        )
    messages, given = messages_of(request.messages), request.chat_template_kwargs or {}
    if taken := given.keys() & {"messages", "self", "continue_final_message"}:
        raise Problem(400, f"{min(taken)} is not a variable of a chat template", param="chat_template_kwargs")
    begun = _begun_reply(request) if request.continue_final_message else None
    tools = Tools.of(request.tools, request.tool_choice, request.parallel_tool_calls, llm.tokenizer.chat)
    thinks = request.beyond.thinks if request.enable_thinking is None else request.enable_thinking
    variables, unread = template_variables(
        llm.tokenizer.chat, given, effort=request.reasoning_effort, thinks=thinks,
        with_tools=tools is not None,
    )  # fmt: skip
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    if begun is not None:
        variables["continue_final_message"] = True
    if tools is not None:
        if request.skip_special_tokens is False:
            raise Problem(400, "with tools, special tokens are not shown", param="skip_special_tokens")
        messages, described = tools.prompt(messages)
        variables = variables | described
        _constrain_calls(tools, options)
    text = _chat_prompt(llm.tokenizer, messages, variables)
    thinking = thinking_after(llm.tokenizer, text, begun, stops=bool(request.stop_in_reasoning))
    prompt = llm.tokenizer.encode(text, add_special_tokens=False)
    room = max(1, llm.max_length - len(prompt))
    options.setdefault("max_new_tokens", room)
    if request.beyond.cuts_length:
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
    if request.max_completion_tokens is not None:
        options["max_new_tokens"] = request.max_completion_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise Problem(400, "top_logprobs needs logprobs", param="top_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return _Read([prompt], tools, thinking, unread)


def _begun_reply(request: ChatRequest) -> str:
    """Return the text of the last message, which the reply goes on from."""
    message = request.messages[-1]
    if message.get("role") != "assistant" or message.get("content") is None or message.get("tool_calls"):
        problem = "continue_final_message needs a last message of the assistant that is text"
        raise Problem(400, problem, param="continue_final_message")
    if request.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other"
        raise Problem(400, problem, param="add_generation_prompt")
    return text_of(message["content"], "the last message", "messages")


def _chat_prompt(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> str:
    """Return the text of a conversation, in the form that the chat template takes.

    Raises:
        RequestError: It takes none of the forms; the error is that for the messages as they were given.
    """
    chat = tokenizer.chat
    if chat is not None and "tool_calls" not in chat.source(with_tools="tools" in variables):
        messages = spelled_out(messages)
    refusal: RequestError | None = None
    for form in fitted(messages):
        try:
            return tokenizer.chat_text(form, **variables)
        except RequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _constrain_calls(tools: Tools, options: dict[str, Any]) -> None:
    """Put the grammar of calls into the options; an answer without calls keeps its own schema."""
    for name in ("regex", "grammar"):
        if name in options:
            raise Problem(400, f"{name} cannot hold together with tools", param=name)
    schema = {"type": "object"} if options.pop("json_object", False) else options.pop("json_schema", None)
    try:
        grammar = tools.grammar(schema)
    except RecursionError:
        raise Problem(400, "the parameters of a tool are nested too deeply", param="tools") from None
    if grammar is None and schema is not None:
        raise Problem(
            400, "response_format cannot hold together with this model's tools", param="response_format"
        )
    if grammar is not None:
        try:
            check_grammar("grammar", grammar)
        except RequestError:  # each tool by itself is good
            says = "the tools are too many, or their schemas too large together; give fewer"
            raise Problem(400, says, param="tools") from None
        options["grammar"] = grammar


def _read_completion(request: CompletionRequest, llm: LLM, options: dict[str, Any]) -> _Read:
    options.setdefault("max_new_tokens", 16)
    if request.echo and request.truncate_prompt:
        raise Problem(400, "echo needs the whole prompt; leave out truncate_prompt", param="echo")
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
        if request.echo:
            options["prompt_logprobs"] = request.logprobs
    prompts = llm.encode(request.prompt)
    if not prompts:
        raise Problem(400, "prompt is empty", param="prompt")
    return _Read(prompts)


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise Problem(400, f"logit_bias names {shortened(key)}, which is no token id", param="logit_bias")
    return int(key)
