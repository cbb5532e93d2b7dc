"""Requests: the bodies of the API, their types, and what they mean to the library.

A field that would change the output is honoured or refused by name (`fields`). A field that changes nothing
here, such as `user`, is taken; an unknown one is ignored, and the header `x-ignored-fields` lists it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, PrivateAttr, create_model

from foredraft.arguments import declared
from foredraft.arguments.values import Choice, Flag, Ids, Number, Strings, Value, Whole, is_number, is_whole
from foredraft.decode.params import SamplingKeywords, SamplingParams
from foredraft.decode.thinking import ThinkingMarkers
from foredraft.errors import ContextLengthError, ForedraftError, RequestError, shortened
from foredraft.llm import LLM
from foredraft.llm.requests import Submission
from foredraft.serve import conversation, fields
from foredraft.serve.fields import Form, Items, JsonSchema, Prediction, ResponseFormat, StreamOptions
from foredraft.serve.forms import chat_text
from foredraft.serve.problems import LengthFields, Problem, TooLong, invalid, of_error
from foredraft.serve.schemas import Fitted
from foredraft.serve.tools import MAX_TOOLS, Tool, ToolChoice, Tools, fitted_schema

MAX_SAMPLES = 128  # of a prompt, as in the API
MAX_LOGPROBS = 20  # alternatives to a token, as in the API
Notes: TypeAlias = Mapping[str, Sequence[str]]  # what has no effect, by header
# What messages or prompts mean: their token ids, the tools, the thinking, and fields that nothing reads.
Meaning: TypeAlias = tuple[list[list[int]], Tools | None, ThinkingMarkers | None, Collection[str]]


def _json_type(value: Value) -> Any:
    match value:
        case Choice(names=names):
            return Literal[tuple(names)]
        case Strings():
            return str | Items[str]
    types = {Flag: bool, Whole: int, Number: float, Ids: Items[int]}
    return next((type_ for kind, type_ in types.items() if isinstance(value, kind)), str)


if TYPE_CHECKING:
    _Sampling: TypeAlias = fields.Body
else:
    _fields = {
        field: (_json_type(declared(SamplingParams)[name].value) | None, None)
        for name, field in fields.SHARED.items()
    }
    _fields |= dict.fromkeys(fields.FORMS, (str | None, None)) | {
        "guided_json": (str | dict[str, Any] | None, None),
        "guided_choice": (Items[str] | None, None),
    }
    _Sampling = create_model("_Sampling", __base__=fields.Body, **_fields)


class _Request(_Sampling):
    """The fields of both kinds of request, beside those that the library's options make."""

    harmless, unsupported = fields.HARMLESS, fields.UNSUPPORTED
    model: str | None = None
    logit_bias: dict[str, float] | Items[Items[int | float]] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: fields.StructuredOutputs | None = None
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

    def chat(self) -> Any:
        return self

    @property
    def shared(self) -> dict[str, Any]:
        """The options of the library that are given with the library's own values."""
        given = {name: getattr(self, field) for name, field in fields.SHARED.items()}
        for name, (sentinel, value) in fields.SENTINELS.items():
            given[name] = value if given[name] == sentinel else given[name]
        return {name: value for name, value in given.items() if value is not None}

    def options(self) -> dict[str, Any]:
        options, most, n = self.shared, self.n_predict, self.n or 1
        if self.logit_bias:
            options["logit_bias"] = _biases(self.logit_bias)
        if self.prediction is not None:
            options["prediction"] = conversation.text_of(
                self.prediction.content, "prediction.content", "prediction"
            )
        if most is not None and most >= 0 and options.setdefault("max_new_tokens", most) != most:
            raise invalid("n_predict", "n_predict and max_tokens differ; give one of them")
        if self.best_of not in (None, n):
            problem = f"best_of is {self.best_of}, but n is {n}; ask for n samples with logprobs"
            raise invalid("best_of", problem, code="unsupported_parameter")
        if self.form is not None:
            options[self.form.option] = self.form.value
        return options

    def kept(self, prompt: list[int]) -> list[int]:
        """Return as many of the last tokens of a prompt as `truncate_prompt_tokens` says."""
        count = self.truncate_prompt_tokens
        if count == 0:
            problem = "truncate_prompt_tokens is 0; give 1 or more, or -1 for as many as there is room for"
            raise invalid("truncate_prompt_tokens", problem)
        return prompt if count is None or count < 0 else prompt[-count:]

    @cached_property
    def form(self) -> Form | None:
        """The one form of the text that is asked for; None where any text is allowed."""
        forms: list[Form] = []
        if self.answer is not None:
            forms = [Form("response_format", "json_schema", self.answer.schema)]
        elif self.response_format is not None and self.response_format.type == "json_object":
            forms = [Form("response_format", "json_object", True)]
        if (given := self.structured_outputs) is not None:
            options = {
                "json_schema": given.json_, "regex": given.regex, "choices": given.choice,
                "grammar": given.grammar, "json_object": given.json_object or None,
            }  # fmt: skip
            chosen = [Form("structured_outputs", *each) for each in options.items() if each[1] is not None]
            if len(chosen) != 1:
                says = f"structured_outputs gives {len(chosen)} forms; give json, regex, choice or grammar"
                raise invalid("structured_outputs", says)
            forms += chosen
        forms += [Form(name, option, getattr(self, name)) for name, option in fields.FORMS.items()]
        forms = [each for each in forms if each.value is not None]
        if len(forms) > 1:
            one, other = forms[0].field, forms[1].field
            raise invalid(one, f"{one} cannot hold together with {other}; give one of them")
        return forms[0] if forms else None

    @cached_property
    def answer(self) -> Fitted | None:
        """The schema of `response_format`, as a grammar holds it; None where the request has none."""
        given, strict = self.response_format, None
        if given is None or given.type == "text":
            return None
        schema = given.schema_
        if given.type == "json_schema":
            form = given.json_schema or JsonSchema()
            schema, strict = form.schema_, form.strict
            if schema is None:
                raise invalid("response_format", "response_format.json_schema.schema is missing")
        if schema is None:
            return None
        return fitted_schema("the answer", schema, "response_format", strict=strict, close=strict)


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    sent: ClassVar[tuple[str | None, ...]] = (None,)
    echo: ClassVar[None] = None
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
    # Of a request in another shape of the API: as many new tokens as there is room for are enough; the reply
    # begins with reasoning, where a template can choose; tools that the server has no use for.
    _cuts_length: bool = PrivateAttr(default=False)
    _thinks: bool | None = PrivateAttr(default=None)
    _ignored_tools: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def of(
        cls, body: dict[str, Any], ignored: Iterable[str], thinks: bool | None = None, *, cuts: bool = False
    ) -> ChatRequest:
        """Return the chat of a request in another shape; errors as `read`."""
        request = cls.read(body)
        request._ignored_tools, request._thinks, request._cuts_length = tuple(ignored), thinks, cuts
        return request

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        return self._ignored_tools

    def meaning(self, llm: LLM, options: dict[str, Any]) -> Meaning:
        """Read the messages, and add the length, the scores and the form of calls to `options`."""
        if llm.tokenizer is None:
            raise invalid("messages", "this model has no tokenizer; use /v1/completions with token ids")
        chat, given = llm.tokenizer.chat, self.chat_template_kwargs or {}
        messages = conversation.messages_of(self.messages)
        if taken := given.keys() & {"messages", "self", "continue_final_message"}:
            raise invalid("chat_template_kwargs", f"{min(taken)} is not a variable of a chat template")
        begun = None
        if self.continue_final_message:
            begun = conversation.begun_reply(self.messages[-1], adds_prompt=bool(self.add_generation_prompt))
        tools = Tools.of(self.tools, self.tool_choice, self.parallel_tool_calls, llm.tokenizer)
        variables, unread = conversation.template_variables(
            chat, given, effort=self.reasoning_effort, thinks=self.enable_thinking,
            prefers=self._thinks, with_tools=tools is not None,
        )  # fmt: skip
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        if begun is not None:
            variables["continue_final_message"] = True
        if tools is not None:
            if self.skip_special_tokens is False:
                raise invalid("skip_special_tokens", "with tools, special tokens are not shown")
            messages, described = tools.prompt(messages)
            variables |= described
            tools.constrain(options, None if self.form is None else self.form.field)
        text = chat_text(llm.tokenizer, messages, variables)
        thinking = conversation.thinking_after(llm.tokenizer, text, begun, stops=bool(self.stop_in_reasoning))
        prompt = self.kept(llm.tokenizer.encode(text, add_special_tokens=False))
        room = max(1, llm.max_length - len(prompt))
        most = options.setdefault("max_new_tokens", room)
        if self._cuts_length:
            options["max_new_tokens"] = min(most, room)
        if self.max_completion_tokens is not None:
            options["max_new_tokens"] = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return [prompt], tools, thinking, unread


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    ignored_tools: ClassVar[tuple[str, ...]] = ()
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def sent(self) -> tuple[str | None, ...]:
        """The text of each prompt, None for one of token ids; at least one, though a list may be empty."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(next(iter(self.prompt), 0), int):
            return (None,)
        return tuple(each if isinstance(each, str) else None for each in self.prompt)

    def meaning(self, llm: LLM, options: dict[str, Any]) -> Meaning:
        """Read the prompts, and add the length and the scores to `options`."""
        if self.echo and (self.truncate_prompt or self.truncate_prompt_tokens is not None):
            truncated = "truncate_prompt" if self.truncate_prompt else "truncate_prompt_tokens"
            raise invalid("echo", f"echo needs the whole prompt; leave out {truncated}")
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            if self.echo:
                options["prompt_logprobs"] = self.logprobs
        if not self.prompt:
            raise invalid("prompt", "prompt is empty; give text or token ids")
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        for place, each in enumerate(self.prompt if several else ()):
            if each in ("", []):
                raise invalid("prompt", f"prompt[{place}] is empty; give text or token ids")
        prompts = [self.kept(prompt) for prompt in llm.encode(self.prompt)]
        room = llm.max_length - max(map(len, prompts))
        options.setdefault("max_new_tokens", max(1, room) if self.n_predict == -1 else 16)
        return prompts, None, None, ()


@dataclass(frozen=True, slots=True)
class Job:
    request: ChatRequest | CompletionRequest  # how the reply shows what comes
    prompts: list[list[int]]
    one: Submission  # of the first prompt, whose client is not known yet; those of the others are alike
    tools: Tools | None = None  # that the reply may call
    ignored: tuple[str, ...] = ()  # unknown fields, and variables that the chat template does not read

    @property
    def samples(self) -> int:
        return self.one.n * len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def notes(self) -> Notes:
        """What of the request has no effect here, by the header that says so."""
        answer, calls = self.request.answer, () if self.tools is None else self.tools.unenforced
        return {
            "x-ignored-fields": self.ignored, "x-ignored-tools": self.request.ignored_tools,
            "x-unenforced-keywords": (*calls, *(() if answer is None else answer.left_out)),
        }  # fmt: skip

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, llm: LLM, names: tuple[str, ...]) -> Job:
        """Read a request; it may take long for long prompts."""
        check_model(request.model, names)
        request.refuse_unsupported()
        options, scores = request.options(), request.prompt_logprobs
        if request.stream and scores is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs needs a whole reply; leave out stream")
        prompts, tools, thinking, unread = request.meaning(llm, options)
        if scores is not None:
            options["prompt_logprobs"] = max(scores, options.get("prompt_logprobs", 0))
        params = llm.params(**cast(SamplingKeywords, options))
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options", "stream_options needs stream")
        one = Submission(
            prompts[0], params, n=1 if request.n is None else request.n,
            truncate="left" if request.truncate_prompt_tokens == -1 else request.truncate_prompt,
            show_special=request.skip_special_tokens is False, trace=bool(request.provenance),
            thinking=thinking, marks=() if tools is None else tuple(tools.special),
        )  # fmt: skip
        return cls(request, prompts, one, tools, tuple(sorted([*request.further, *unread])))


@contextmanager
def as_problems(
    request: ChatRequest | CompletionRequest | None = None,
    lengths: LengthFields | None = None,
    body: Mapping[str, object] | None = None,
) -> Iterator[None]:
    """Raise errors of the library as problems that name the fields of the request in place of its options."""
    try:
        yield
    except ForedraftError as error:
        problem, form = of_error(error), None if request is None else request.form
        if isinstance(error, ContextLengthError) and lengths is not None:
            problem = TooLong(error, lengths, body or {})
        elif form and isinstance(error, RequestError) and error.option == form.option != form.field:
            problem = invalid(form.field, problem.message.replace(form.option, form.field, 1))
        raise problem from error


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    if name is not None and name not in names:
        says = f"the model {shortened(name)} does not exist; this server has {names[0]!r}"
        raise Problem(404, says, param="model", code="model_not_found")


def _biases(given: dict[str, float] | list[list[int | float]]) -> dict[int, float]:
    """Return biases by token id, which may come as a table or as llama.cpp's pairs."""
    biases: dict[int, float] = {}
    for pair in given.items() if isinstance(given, dict) else given:
        if isinstance(pair, tuple):
            if not pair[0].isdecimal() or len(pair[0]) > 10:
                raise invalid("logit_bias", f"logit_bias names {shortened(pair[0])}, which is no token id")
        elif len(pair) != 2 or not is_whole(pair[0], 0) or not is_number(pair[1]):
            problem = f"logit_bias has {shortened(pair)}; give pairs of a token id and a number"
            raise invalid("logit_bias", problem)
        biases[int(pair[0])] = pair[1]
    return biases
