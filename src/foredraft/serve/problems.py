"""Problems: errors in the shape of the OpenAI API; and the fields of other servers, most of them refused by
name.

A form of text stands for an option of the library; a request gives one at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from foredraft.errors import ContextLengthError, ForedraftError, Option, RequestError, python_spelling
from foredraft.llm.output import Output

# Options of the library -> fields of requests, where the names differ.
FIELDS = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "truncate": "truncate_prompt",
    "include_stop": "include_stop_str_in_output",
}  # fmt: skip
TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "overloaded_error",
}  # fmt: skip

MAX_SHOWN = 1000  # characters of a message


class ErrorFields(TypedDict, closed=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict, closed=True):
    """An error in the shape of the OpenAI API; within a stream, an event has the same shape."""

    error: ErrorFields


class Problem(Exception):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,  # the HTTP status
        message: str,  # one line for people
        *,
        param: str | None = None,  # the field at fault
        code: str | None = None,  # for programs
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_SHOWN:  # it may quote what the client sent
            message = f"{message[:MAX_SHOWN]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})  # of the response

    @classmethod
    def read(cls, status: int, body: Error) -> Self:
        error = body["error"]
        return cls(status, error["message"], param=error["param"], code=error["code"])

    @property
    def body(self) -> Error:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class LengthFields(NamedTuple):
    """The fields of a shape of the API that decide how long a request is."""

    prompt: str  # holds the prompt
    new: tuple[str, ...] = ()  # say how many new tokens are asked for; the first one that is given counts
    shorten: str = ""  # what makes the server shorten a prompt, as a remedy names it

    def asked(self, body: Mapping[str, object]) -> str | None:
        """Return the field by which a body asks for a number of tokens; None where none does."""
        return next((name for name in self.new if body.get(name) is not None), None)


class TooLong(Problem):
    """A prompt, perhaps with the tokens that are asked for, is longer than the context.

    Clients know it by its code or by words of its message: "this model's maximum context length is" (litellm)
    and "prompt is too long" (LangChain, which looks for the code only in what OpenAI's client makes text of)
    (https://github.com/BerriAI/litellm, exception_mapping_utils.py; https://github.com/langchain-ai/langchain,
    chat_models of libs/partners/openai and libs/partners/anthropic).
    """

    def __init__(self, error: ContextLengthError, fields: LengthFields, asked: str | None) -> None:
        has, remedy = f"it has {error.prompt}", f"shorten {fields.prompt}"
        if asked is not None:
            has += f" and {asked} asks for {error.new}"
            remedy += f", or lower {asked}"
        elif error.prompt < error.most:
            has += f" and the reply needs {error.new}"
        if fields.shorten and error.new < error.most:
            remedy += f", or give {fields.shorten}"
        if error.most < error.reach:
            remedy += f", or start the server with a --max-length of up to {error.reach}"
        says = f"This model's maximum context length is {error.most} tokens, so the prompt is too long: {has}"
        super().__init__(400, f"{says}; {remedy}", param=fields.prompt, code="context_length_exceeded")
        self.for_messages = f"prompt is too long: {error.prompt} tokens > {error.most - error.new} maximum"


def of_error(error: ForedraftError) -> Problem:
    """Return a user's mistake, or a request that failed, as a problem."""
    message = error.describe(
        lambda option: python_spelling(Option(FIELDS.get(option.name, option.name), option.value))
    )
    if not isinstance(error, RequestError):
        return Problem(500, message)
    option = error.option
    return Problem(400, message, param=None if option is None else FIELDS.get(option, option))


@contextmanager
def as_problems(
    fields: LengthFields | None = None, body: Mapping[str, object] | None = None
) -> Iterator[None]:
    try:
        yield
    except ContextLengthError as error:
        if fields is None:
            raise of_error(error) from error
        raise TooLong(error, fields, fields.asked(body or {})) from error
    except ForedraftError as error:
        raise of_error(error) from error


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error and its causes came through, once it is answered.

    They hold the request. A frame that holds the error, as that of a wait for a thread does, closes a circle,
    whose memory would wait for a collection of garbage.
    """
    left, known = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in known:
            known.add(id(each))
            each.__traceback__ = None
            left += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def check_output(output: Output) -> None:
    if output.finish_reason == "error":
        raise Problem(500, f"the request failed: {output.error}", code="generation_failed")


def busy(message: str, status: int = 503, seconds: int = 1) -> Problem:
    """Return the refusal of a request that may come again after some seconds."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    return Problem(status, message, code=code, headers={"Retry-After": str(seconds)})


# Fields that have the value of an option of the library -> that option.
FORMS = {
    "regex": "regex", "grammar": "grammar", "ebnf": "grammar", "guided_json": "json_schema",
    "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar",
}  # fmt: skip


class Form(NamedTuple):
    """The form of a text: the field that gives it, the option that it stands for, and its value."""

    field: str
    option: str
    value: Any


class StructuredOutputs(BaseModel):
    """The form of the text, as vLLM's requests give it."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


def structured_form(given: StructuredOutputs | None) -> tuple[str, Any] | None:
    """Return the option for `structured_outputs`, and its value; None without the field."""
    if given is None:
        return None
    options = {
        "json_schema": given.json_, "regex": given.regex, "choices": given.choice, "grammar": given.grammar,
        "json_object": given.json_object or None,
    }  # fmt: skip
    chosen = [(option, value) for option, value in options.items() if value is not None]
    if len(chosen) != 1:
        problem = f"structured_outputs gives {len(chosen)} forms; give json, regex, choice or grammar"
        raise Problem(400, problem, param="structured_outputs")
    return chosen[0]


def only_form(forms: Iterable[Form]) -> Form | None:
    given = list(forms)
    if len(given) > 1:
        one, other = given[0].field, given[1].field
        raise Problem(400, f"{one} cannot hold together with {other}; give one of them", param=one)
    return given[0] if given else None


@contextmanager
def named_as_given(form: Form | None) -> Iterator[None]:
    """Name the field that a request gives in an error about the option that it stands for."""
    try:
        yield
    except RequestError as error:
        if form is None or error.option != form.option or form.field == form.option:
            raise
        problem = of_error(error)
        message = problem.message.replace(form.option, form.field, 1)
        raise Problem(problem.status, message, param=form.field, code=problem.code) from error


# Where each server declares the fields of its requests.
SERVERS = {
    "vllm": "https://github.com/vllm-project/vllm/tree/main/vllm/entrypoints/openai",
    "sglang": "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/entrypoints/openai/protocol.py",
    "llama.cpp": "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-schema.cpp",
    "tgi": "https://github.com/huggingface/text-generation-inference/blob/main/router/src/lib.rs",
    "ollama": "https://github.com/ollama/ollama/blob/main/openai/openai.go",
    "webui": "https://github.com/oobabooga/text-generation-webui/blob/main/extensions/openai/typing.py",
    "transformers": "https://huggingface.co/docs/transformers/main_classes/text_generation",
    "mistral": "https://docs.mistral.ai/api",
}


class Foreign(NamedTuple):
    """A field of other servers."""

    servers: str  # those that know it, by their names in `SERVERS`, separated by spaces
    off: tuple[Any, ...] = (None,)  # its values that leave the text as it is
    instead: str = "leave it out"  # what to do instead


FALSE, TRUE = (None, False), (None, True)
EMPTY: tuple[Any, ...] = (None, "", [], {})
ZERO, ONE, LESS = (None, 0), (None, 1), (None, 0, -1)  # a float that is whole equals its integer
PENALTIES = "give repetition_penalty, presence_penalty or frequency_penalty"
TRUNCATIONS = "give top_k, top_p, min_p or typical_p"
ADAPTER = "serve a model with its adapter merged"
TEMPLATE = "put a chat_template.jinja into the model's folder"
CONSTRAINT = "give response_format, regex or grammar"
ORDER = "leave it out; the order of the transforms is that of transformers"

FOREIGN: dict[str, Foreign] = {
    # beam search, and other ways to search
    "num_beams": Foreign("transformers", ONE, "leave it out; beam search is not supported"),
    "use_beam_search": Foreign("vllm", FALSE, "leave it out; beam search is not supported"),
    "length_penalty": Foreign("vllm transformers", ONE),
    "early_stopping": Foreign("vllm transformers", FALSE),
    "penalty_alpha": Foreign("webui transformers", ZERO),
    "guidance_scale": Foreign("webui transformers", ONE),
    "negative_prompt": Foreign("webui", EMPTY),
    "do_sample": Foreign("tgi webui transformers", TRUE, "give temperature 0"),
    # truncation and temperature
    "top_n_sigma": Foreign("llama.cpp", LESS, TRUNCATIONS),
    "top_a": Foreign("webui", ZERO, TRUNCATIONS),
    "tfs": Foreign("webui", ONE, TRUNCATIONS),
    "tfs_z": Foreign("llama.cpp", ONE, TRUNCATIONS),
    "epsilon_cutoff": Foreign("webui", ZERO, TRUNCATIONS),
    "eta_cutoff": Foreign("webui", ZERO, TRUNCATIONS),
    "xtc_probability": Foreign("llama.cpp webui", ZERO, TRUNCATIONS),
    "mirostat": Foreign("llama.cpp", ZERO, TRUNCATIONS),
    "mirostat_mode": Foreign("webui", ZERO, TRUNCATIONS),
    "adaptive_target": Foreign("llama.cpp", (None, -1), TRUNCATIONS),
    "min_keep": Foreign("llama.cpp", ZERO),
    "dynatemp_range": Foreign("llama.cpp", ZERO, "give temperature"),
    "dynamic_temperature": Foreign("webui", FALSE, "give temperature"),
    "smoothing_factor": Foreign("webui", ZERO, "give temperature"),
    "temperature_last": Foreign("webui", FALSE, "leave it out; temperature comes before truncation"),
    "samplers": Foreign("llama.cpp", EMPTY, ORDER),
    "sampler_priority": Foreign("webui", EMPTY, ORDER),
    "preset": Foreign("webui", EMPTY, "give its options one by one"),
    "generation_config": Foreign("transformers", EMPTY, "give its options one by one"),
    "options": Foreign("ollama", EMPTY, "give its members as fields of the request"),
    # penalties
    "repeat_last_n": Foreign("llama.cpp", (None, -1), "leave it out; penalties look at the whole text"),
    "repetition_penalty_range": Foreign("webui", ZERO, "leave it out; penalties look at the whole text"),
    "dry_multiplier": Foreign("llama.cpp webui", ZERO, PENALTIES),
    "no_repeat_ngram_size": Foreign("webui transformers", ZERO, PENALTIES),
    "encoder_repetition_penalty": Foreign("webui transformers", ONE, PENALTIES),
    "repetition_detection": Foreign("vllm", EMPTY, PENALTIES),
    "watermark": Foreign("tgi", FALSE),
    "watermarking": Foreign("vllm", FALSE),
    "custom_logit_processor": Foreign("sglang", EMPTY, "give logit_bias"),
    "custom_params": Foreign("sglang", EMPTY),
    "logits_processors": Foreign("vllm", EMPTY, "give logit_bias"),
    "vllm_xargs": Foreign("vllm", EMPTY),
    "random_seed": Foreign("mistral", (None, -1), "its name is seed"),
    # where a text ends
    "stop_regex": Foreign("sglang", EMPTY, "give stop, or regex for the whole text"),
    "no_stop_trim": Foreign("sglang", FALSE, "its name is include_stop_str_in_output"),
    "ban_eos_token": Foreign("webui", FALSE, "its name is ignore_eos"),
    "custom_token_bans": Foreign("webui", EMPTY, "give logit_bias"),
    "thinking_token_budget": Foreign("vllm", (None, -1)),
    "reasoning_budget_tokens": Foreign("llama.cpp", (None, -1)),
    "t_max_predict_ms": Foreign("llama.cpp", LESS, "give max_tokens"),
    "n_indent": Foreign("llama.cpp", ZERO),
    "auto_max_new_tokens": Foreign("webui", FALSE, "give max_tokens"),
    "truncation_length": Foreign("webui", ZERO, "its name is truncate_prompt_tokens"),
    "truncate": Foreign("tgi", (None,), "its name is truncate_prompt_tokens"),
    # constraints
    "grammar_string": Foreign("webui", EMPTY, "its name is grammar"),
    "grammar_lazy": Foreign("llama.cpp", FALSE),
    "grammar_triggers": Foreign("llama.cpp", EMPTY),
    "preserved_tokens": Foreign("llama.cpp", EMPTY),
    "guided_whitespace_pattern": Foreign("vllm", (None,), CONSTRAINT),
    "structural_tag": Foreign("vllm sglang", EMPTY, CONSTRAINT),
    "format": Foreign("ollama", EMPTY, "its name is response_format"),
    # the model
    "lora": Foreign("llama.cpp", EMPTY, ADAPTER),
    "lora_path": Foreign("sglang", EMPTY, ADAPTER),
    "adapter_id": Foreign("tgi", EMPTY, ADAPTER),
    # the prompt
    "prompt_embeds": Foreign("vllm", EMPTY, "give the prompt as text or token ids"),
    "input_ids": Foreign("sglang", EMPTY, "give token ids as the prompt of /v1/completions"),
    "session_params": Foreign("sglang", EMPTY, "give the whole conversation"),
    "add_bos_token": Foreign("webui", TRUE, "give the prompt as token ids"),
    "image_data": Foreign("llama.cpp", EMPTY),
    "mm_processor_kwargs": Foreign("vllm", EMPTY),
    "generation_prompt": Foreign("llama.cpp", EMPTY, TEMPLATE),
    "template": Foreign("ollama", EMPTY, TEMPLATE),
    "chat_template_str": Foreign("webui", EMPTY, TEMPLATE),
    "instruction_template": Foreign("webui", EMPTY, TEMPLATE),
    "instruction_template_str": Foreign("webui", EMPTY, TEMPLATE),
    "mode": Foreign("webui", (None, "instruct"), TEMPLATE),
    "character": Foreign("webui", EMPTY, "give a system message"),
    "context": Foreign("webui ollama", EMPTY, "give a system message"),
    "greeting": Foreign("webui", EMPTY, "give it as a message"),
    "user_bio": Foreign("webui", EMPTY, "give a system message"),
    "chat_instruct_command": Foreign("webui", EMPTY, "give a system message"),
    "continue_": Foreign("webui", FALSE, "its name is continue_final_message"),
    "impersonate": Foreign("webui", FALSE),
    "tool_prompt": Foreign("tgi", EMPTY, "give a system message"),
    "guideline": Foreign("tgi", EMPTY, "give a system message"),
    "safe_prompt": Foreign("mistral", FALSE, "give a system message"),
    "task": Foreign("sglang", EMPTY),
    "_debug_render_only": Foreign("ollama", FALSE, "give the messages to /tokenize"),
    # what the text shows, and its scores
    "spaces_between_special_tokens": Foreign("vllm", TRUE, "leave it out; special tokens stand as they are"),
    "return_full_text": Foreign("tgi", FALSE, "its name is echo, of /v1/completions"),
    "parse_tool_calls": Foreign("llama.cpp", TRUE, "leave out tools"),
    "separate_reasoning": Foreign("sglang", TRUE),
    "stream_reasoning": Foreign("sglang", TRUE),
    "include_reasoning": Foreign("vllm", TRUE),
    "logprob_token_ids": Foreign("vllm", EMPTY, "give the number of the likeliest tokens as logprobs"),
    "return_tokens_as_token_ids": Foreign("vllm", FALSE, "its name is return_token_ids"),
    "return_tokens": Foreign("llama.cpp", FALSE, "its name is return_token_ids"),
    "n_probs": Foreign("llama.cpp", ZERO, "its name is logprobs"),
    "post_sampling_probs": Foreign("llama.cpp", FALSE, "leave it out; scores are by the model's logits"),
    "top_n_tokens": Foreign("tgi", ZERO, "its name is logprobs"),
    "decoder_input_details": Foreign("tgi", FALSE, "its name is prompt_logprobs"),
    "n_cmpl": Foreign("llama.cpp", ONE, "its name is n"),
}  # fmt: skip
# Fields of theirs that act only beside one of the table, or of those that requests honour.
DEPENDENT = frozenset(
    "xtc_threshold mirostat_tau mirostat_eta adaptive_decay dynatemp_exponent dynatemp_low dynatemp_high"
    " smoothing_curve dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
    " reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags"
    " guided_decoding_backend bot_name name1 name2 user_name".split()
)
