"""Requests: the bodies of the API, their types, and what they mean to the library.

A field that would change the output is honoured or refused by name. A field that changes nothing here, such
as `user`, is taken; an unknown one is ignored, and the header `x-ignored-fields` lists it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, create_model

from foredraft.arguments import declared, spelled_elsewhere
from foredraft.arguments.values import Choice, Flag, Ids, Number, Strings, Value, Whole, is_number, is_whole
from foredraft.constraints.grammar import check_grammar
from foredraft.decode.params import SamplingKeywords, SamplingParams
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import RequestError, shortened
from foredraft.llm import LLM
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.blocks import template_variables, thinking_after
from foredraft.serve.conversation import Messages, fitted, messages_of, spelled_out, text_of
from foredraft.serve.offload import without_collection
from foredraft.serve.problems import (
    DEPENDENT,
    FIELDS,
    FOREIGN,
    FORMS,
    Form,
    Problem,
    StructuredOutputs,
    named_as_given,
    only_form,
    structured_form,
)
from foredraft.serve.schemas import Fitted
from foredraft.serve.tools import MAX_TOOLS, Tool, ToolChoice, Tools, fitted_schema

MAX_SAMPLES = 128  # of a prompt, as in the API
MAX_LOGPROBS = 20  # alternatives to a token, as in the API
T = TypeVar("T")
# What messages or prompts mean: their token ids, the tools, the thinking, and fields that nothing reads.
Parts: TypeAlias = tuple[list[list[int]], Tools | None, ThinkingMarkers | None, Collection[str]]
# A list whose first wrong item ends the check: a million errors would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
# Fields that change nothing here.
HARMLESS = DEPENDENT | frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity"
    " reasoning_effort parallel_tool_calls request_id priority".split()
)
# Fields that would change the output and are not supported; a value that says "off" is taken.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "tools": (None, []), "tool_choice": (None, "none", "auto"),
    "functions": (None, []), "function_call": (None, "none", "auto"), "audio": (None,),
    "modalities": (None, ["text"]), "web_search_options": (None,),
    "bad_words": (None, []), "dimensions": (None,),
    "prompt": (None,), "echo": (None, False), "messages": (None,), "max_completion_tokens": (None,),
    "top_logprobs": (None, 0), "chat_template_kwargs": (None, {}), "chat_template": (None,),
    "add_generation_prompt": (None, True), "continue_final_message": (None, False), "documents": (None, []),
    "add_special_tokens": (None,), "banned_strings": (None, [], ""),
    "min_new_tokens": (None, 0), "max_new_tokens": (None,),
    "repeat_penalty": (None, 1, 1.0), "json_schema": (None,), "json_object": (None, False),
    **{name: foreign.off for name, foreign in FOREIGN.items()},
}  # fmt: skip
# Options of the library that requests have in another form, or not at all.
OTHER_FORM = {
    "grammar",
    "regex",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "choices",
    "json_schema",
    "json_object",
    "prediction",
}
# Fields -> the value that other servers' clients send for "off" or "any", and what it means here.
SENTINELS: dict[str, tuple[int, int | None]] = {"top_k": (-1, 0), "seed": (-1, None)}
# Further options of the library -> fields of requests. They have the same values.
SHARED = {name: FIELDS.get(name, name) for name in declared(SamplingParams) if name not in OTHER_FORM}
CLASS_NAME = re.compile(r" or instance of \w+$")  # at the end of what pydantic says of an object
INSTEAD = {
    **{name: foreign.instead for name, foreign in FOREIGN.items()},
    **{name: f"its name is {field}" for name, field in SHARED.items() if name != field},
    **{
        name: f"its name is {SHARED[here]}"
        for name, here in spelled_elsewhere(SamplingParams).items()
        if here in SHARED
    },
    "functions": "its name is tools", "function_call": "its name is tool_choice",
    "prompt": "it is a field of /v1/completions", "echo": "it is a field of /v1/completions",
    "messages": "it is a field of /v1/chat/completions",
    "max_completion_tokens": "its name here is max_tokens",
    "top_logprobs": "give their number as logprobs",
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
    """The form of the text; a schema beside "json_object" is llama.cpp's spelling of "json_schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class Prediction(BaseModel):
    """What the text will probably be."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["content"]
    content: str | Items[dict[str, Any]]

    @property
    def text(self) -> str:
        return text_of(self.content, "prediction.content", "prediction")


class Body(BaseModel):
    """The base of all bodies. Fields that it does not declare are kept, and judged by three tables."""

    model_config = ConfigDict(extra="allow", strict=True)
    harmless: ClassVar[frozenset[str]]  # fields that change nothing here
    # fields that would change the output, with the values that leave it as it is
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]]
    instead: ClassVar[Mapping[str, str]] = {}  # what to do instead of some of them

    @classmethod
    def read(cls, body: object) -> Self:
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
        case Ids():
            return Items[int]
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
    model: str | None = None
    logit_bias: dict[str, float] | Items[Items[int | float]] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    n_predict: int | None = Field(default=None, ge=-1)
    best_of: int | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left"] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    prediction: Prediction | None = None
    truncate_prompt: Literal["left"] | None = None
    skip_special_tokens: bool | None = None
    provenance: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @property
    def shared(self) -> dict[str, Any]:
        """The options of the library that are given with the library's own values."""
        given = {name: getattr(self, field) for name, field in SHARED.items()}
        for name, (sentinel, value) in SENTINELS.items():
            given[name] = value if given[name] == sentinel else given[name]
        return {name: value for name, value in given.items() if value is not None}

    def options(self) -> dict[str, Any]:
        options = self.shared
        if self.logit_bias:
            options["logit_bias"] = _biases(self.logit_bias)
        if self.prediction is not None:
            options["prediction"] = self.prediction.text
        most = self.n_predict
        if most is not None and most >= 0 and options.setdefault("max_new_tokens", most) != most:
            raise Problem(400, "n_predict and max_tokens differ; give one of them", param="n_predict")
        if self.best_of not in (None, self.n or 1):
            problem = f"best_of is {self.best_of}, but n is {self.n or 1}; ask for n samples with logprobs"
            raise Problem(400, problem, param="best_of", code="unsupported_parameter")
        if self.form is not None:
            options[self.form.option] = self.form.value
        return options

    def kept(self, prompt: list[int]) -> list[int]:
        """Return as many of the last tokens of a prompt as `truncate_prompt_tokens` says."""
        count = self.truncate_prompt_tokens
        if count == 0:
            problem = "truncate_prompt_tokens is 0; give 1 or more, or -1 for as many as there is room for"
            raise Problem(400, problem, param="truncate_prompt_tokens")
        return prompt if count is None or count < 0 else prompt[-count:]

    @cached_property
    def form(self) -> Form | None:
        given = {
            "response_format": self._response_form,
            "structured_outputs": structured_form(self.structured_outputs),
        } | {field: (option, getattr(self, field)) for field, option in FORMS.items()}
        return only_form(
            Form(field, *form) for field, form in given.items() if form is not None and form[1] is not None
        )

    @property
    def _response_form(self) -> tuple[str, Any] | None:
        """The option for `response_format`, and its value; None where any text is allowed."""
        if self.answer is not None:
            return "json_schema", self.answer.schema
        wanted = self.response_format is not None and self.response_format.type == "json_object"
        return ("json_object", True) if wanted else None

    @cached_property
    def answer(self) -> Fitted | None:
        """The schema of `response_format`, as a grammar holds it; None where the request has none."""
        given = self.response_format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            schema, strict = given.schema_, None
        else:
            form = given.json_schema or JsonSchema()
            schema, strict = form.schema_, form.strict
            if schema is None:
                raise Problem(400, "response_format.json_schema.schema is missing", param="response_format")
        if schema is None:
            return None
        return fitted_schema("the answer", schema, "response_format", strict=strict, close=strict)


@dataclass(frozen=True, slots=True)
class Further:
    """What a request in another shape of the API asks for beyond the fields of a chat."""

    cuts_length: bool = False  # as many new tokens as there is room for, where it asks for more
    # whether the reply begins with reasoning, for templates that can choose; None leaves it open
    thinks: bool | None = None
    ignored_tools: tuple[str, ...] = ()  # tools that the server has no use for


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    prompts: ClassVar[int] = 1
    sent: ClassVar[tuple[str | None, ...]] = (None,)
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

    @property
    def sent(self) -> tuple[str | None, ...]:
        """The text of each prompt; None for one of token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(next(iter(self.prompt), 0), int):
            return (None,)
        return tuple(each if isinstance(each, str) else None for each in self.prompt)


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the library understands it."""

    prompts: list[list[int]]  # token ids
    params: SamplingParams  # the same for all prompts
    n: int  # samples of each prompt
    echo: bool = False  # the reply begins with the prompt
    stream: bool = False  # the reply is streamed
    include_usage: bool = False  # a stream ends with the usage
    continuous_usage: bool = False  # each part of a stream has the usage so far
    truncate: Literal["left"] | None = None  # as in `LLM.generate`
    show_special: bool = False  # as in `LLM.generate`
    provenance: bool = False  # the reply has the source of each token
    # the prompts as the client sent them: text, or None for token ids and conversations
    sent: tuple[str | None, ...] = ()
    token_ids: bool = False  # the reply has the ids of the prompt and of the new tokens
    # the reply has the scores of the prompt's tokens, each with so many of the likeliest
    prompt_scores: int | None = None
    form: Form | None = None  # of the text
    tools: Tools | None = None  # that the reply may call
    thinking: ThinkingMarkers | None = None  # how the reply marks its reasoning; None where it has none
    # names of unknown fields, and of variables that the chat template does not read
    ignored: tuple[str, ...] = ()
    ignored_tools: tuple[str, ...] = ()  # tools that the model does not see
    unenforced: tuple[str, ...] = ()  # places of keywords of schemas that no grammar holds

    @property
    def samples(self) -> int:
        return self.n * len(self.prompts)

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, llm: LLM, names: tuple[str, ...]) -> Job:
        """Read a request; it may take long for long prompts."""
        check_model(request.model, names)
        request.refuse_unsupported()
        options = request.options()
        if request.stream and request.prompt_logprobs is not None:
            raise Problem(
                400, "prompt_logprobs needs a whole reply; leave out stream", param="prompt_logprobs"
            )
        read = _read_chat if isinstance(request, ChatRequest) else _read_completion
        prompts, tools, thinking, unread = read(cast(Any, request), llm, options)
        if request.prompt_logprobs is not None:
            options["prompt_logprobs"] = max(request.prompt_logprobs, options.get("prompt_logprobs", 0))
        with named_as_given(request.form):
            params = llm.params(**cast(SamplingKeywords, options))
        if request.stream_options is not None and not request.stream:
            raise Problem(400, "stream_options needs stream", param="stream_options")
        stream_options = request.stream_options or StreamOptions()
        return cls(
            prompts, params,
            n=1 if request.n is None else request.n,
            echo=isinstance(request, CompletionRequest) and bool(request.echo),
            stream=bool(request.stream),
            include_usage=bool(stream_options.include_usage),
            continuous_usage=bool(stream_options.continuous_usage_stats),
            truncate="left" if request.truncate_prompt_tokens == -1 else request.truncate_prompt,
            show_special=request.skip_special_tokens is False,
            provenance=bool(request.provenance),
            sent=request.sent,
            token_ids=bool(request.return_token_ids),
            prompt_scores=request.prompt_logprobs,
            form=request.form,
            tools=tools,
            thinking=thinking,
            ignored=tuple(sorted([*request.further, *unread])),
            ignored_tools=request.beyond.ignored_tools if isinstance(request, ChatRequest) else (),
            unenforced=(
                *(() if tools is None else tools.unenforced),
                *(() if request.answer is None else request.answer.left_out),
            ),
        )  # fmt: skip


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    if name is not None and name not in names:
        raise Problem(
            404, f"the model {shortened(name)} does not exist; this server has {names[0]!r}",
            param="model", code="model_not_found",
        )  # fmt: skip


def _first(error: ValidationError, body: object) -> Problem:
    """Return the first wrong field as a problem; of the errors of its types, the deepest tells most."""
    errors = error.errors(include_url=False, include_input=False)
    found = [(_path(each["loc"], body, missing=each["type"] == "missing"), each["msg"]) for each in errors]
    path, message = max(
        (each for each in found if each[0][:1] == found[0][0][:1]), key=lambda each: len(each[0])
    )
    says = CLASS_NAME.sub("", message)
    return Problem(400, f"{'.'.join(path) or 'the body'}: {says}", param=path[0] if path else None)


def _path(parts: tuple[int | str, ...], body: object, *, missing: bool) -> list[str]:
    """Return those parts of an error's path that lead through a body; pydantic's have names of types, too."""
    path, value = [], cast(Any, body)
    for part in parts[:-1] if missing else parts:
        known = range(len(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else ()
        if part in known:
            value = value[part]
            path.append(str(part))
    return [*path, str(parts[-1])] if missing else path


def _read_chat(request: ChatRequest, llm: LLM, options: dict[str, Any]) -> Parts:
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
    variables, unread = template_variables(
        llm.tokenizer.chat, given, effort=request.reasoning_effort, thinks=request.enable_thinking,
        prefers=request.beyond.thinks, with_tools=tools is not None,
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
        _constrain_calls(tools, options, request.form)
    text = _chat_prompt(llm.tokenizer, messages, variables)
    thinking = thinking_after(llm.tokenizer, text, begun, stops=bool(request.stop_in_reasoning))
    prompt = request.kept(llm.tokenizer.encode(text, add_special_tokens=False))
    room = max(1, llm.max_length - len(prompt))
    options.setdefault("max_new_tokens", room)
    if request.beyond.cuts_length:
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
    if request.max_completion_tokens is not None:
        options["max_new_tokens"] = request.max_completion_tokens
    if request.top_logprobs and not request.logprobs:
        raise Problem(400, "top_logprobs needs logprobs", param="top_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return [prompt], tools, thinking, unread


def _begun_reply(request: ChatRequest) -> str:
    message = request.messages[-1]
    if message.get("role") != "assistant" or message.get("content") is None or message.get("tool_calls"):
        problem = "continue_final_message needs a last message of the assistant that is text"
        raise Problem(400, problem, param="continue_final_message")
    if request.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other"
        raise Problem(400, problem, param="add_generation_prompt")
    return text_of(message["content"], "the last message", "messages")


def _chat_prompt(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any]) -> str:
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


def _constrain_calls(tools: Tools, options: dict[str, Any], form: Form | None) -> None:
    """Put the grammar of calls into the options; an answer without calls keeps its own schema."""
    for name in ("regex", "choices", "grammar"):
        if name in options:
            field = name if form is None else form.field
            raise Problem(400, f"{field} cannot hold together with tools", param=field)
    schema = {"type": "object"} if options.pop("json_object", False) else options.pop("json_schema", None)
    try:
        grammar = tools.grammar(schema)
    except RecursionError:
        raise Problem(400, "the parameters of a tool are nested too deeply", param="tools") from None
    if grammar is None and schema is not None:
        field = "response_format" if form is None else form.field
        raise Problem(400, f"{field} cannot hold together with this model's tools", param=field)
    if grammar is not None:
        try:
            check_grammar("grammar", grammar)
        except RequestError:  # each tool by itself is good
            says = "the tools are too many, or their schemas too large together; give fewer"
            raise Problem(400, says, param="tools") from None
        options["grammar"] = grammar


def _read_completion(request: CompletionRequest, llm: LLM, options: dict[str, Any]) -> Parts:
    truncated = "truncate_prompt" if request.truncate_prompt else "truncate_prompt_tokens"
    if request.echo and (request.truncate_prompt or request.truncate_prompt_tokens is not None):
        raise Problem(400, f"echo needs the whole prompt; leave out {truncated}", param="echo")
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
        if request.echo:
            options["prompt_logprobs"] = request.logprobs
    _check_prompts(request.prompt)
    prompts = [request.kept(prompt) for prompt in llm.encode(request.prompt)]
    room = llm.max_length - max(map(len, prompts))
    options.setdefault("max_new_tokens", max(1, room) if request.n_predict == -1 else 16)
    return prompts, None, None, ()


def _check_prompts(prompt: str | list[Any]) -> None:
    if not prompt:
        raise Problem(400, "prompt is empty; give text or token ids", param="prompt")
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        for place, each in enumerate(prompt):
            if each in ("", []):
                raise Problem(400, f"prompt[{place}] is empty; give text or token ids", param="prompt")


def _biases(given: dict[str, float] | list[list[int | float]]) -> dict[int, float]:
    """Return biases by token id, which may come as a table or as llama.cpp's pairs."""
    if isinstance(given, dict):
        return {_token_id(key): bias for key, bias in given.items()}
    biases: dict[int, float] = {}
    for pair in given:
        if len(pair) != 2 or not is_whole(pair[0], 0) or not is_number(pair[1]):
            problem = f"logit_bias has {shortened(pair)}; give pairs of a token id and a number"
            raise Problem(400, problem, param="logit_bias")
        biases[int(pair[0])] = pair[1]
    return biases


def _token_id(key: str) -> int:
    if not key.isdecimal() or len(key) > 10:
        raise Problem(400, f"logit_bias names {shortened(key)}, which is no token id", param="logit_bias")
    return int(key)
