"""Fields of requests: tables of those that are options, change nothing or are refused, and their types.

A field that would change the output is honoured or refused by name, unless its value says "off". A form of
text stands for an option of the library; a request gives one at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError

from foredraft.arguments import declared
from foredraft.decode.params import SamplingParams
from foredraft.serve.offload import without_collection
from foredraft.serve.problems import FIELDS, first_fault, invalid

if TYPE_CHECKING:
    from foredraft.serve.requests import ChatRequest, CompletionRequest

T = TypeVar("T")
# A list whose first wrong item ends the check: a million errors would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]

# Fields that have the value of an option of the library -> that option.
FORMS = {
    "regex": "regex", "grammar": "grammar", "ebnf": "grammar", "guided_json": "json_schema",
    "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "grammar",
}  # fmt: skip
# Options that requests have in another form, or not at all.
OTHER_FORM = frozenset(
    "grammar regex logit_bias logprobs prompt_logprobs choices json_schema json_object prediction".split()
)
# Further options of the library -> fields of requests. They have the same values.
SHARED = {name: FIELDS.get(name, name) for name in declared(SamplingParams) if name not in OTHER_FORM}
# Options -> the value that other servers' clients send for "off" or "any", and what it means here.
SENTINELS: dict[str, tuple[int, int | None]] = {"top_k": (-1, 0), "seed": (-1, None)}


class Refused(NamedTuple):
    """A field that would change the output, and that is not supported."""

    off: tuple[Any, ...]  # its values that leave the text as it is
    instead: str  # what to do instead


def refused(*rows: tuple[tuple[Any, ...], str, str]) -> dict[str, Refused]:
    """Return fields by name, of rows of values that are off, a remedy and names."""
    return {name: Refused(off, instead) for off, instead, names in rows for name in names.split()}


LEAVE = "leave it out"
UNSET: tuple[Any, ...] = (None,)
FALSE, TRUE = (None, False), (None, True)
NO_LIST: tuple[Any, ...] = (None, [])
EMPTY: tuple[Any, ...] = (None, "", [], {})
ZERO, ONE, LESS, MINUS = (None, 0), (None, 1), (None, 0, -1), (None, -1)  # a whole float equals its integer
WORDS = (None, "none", "auto")
NO_BEAMS = "leave it out; beam search is not supported"
PENALTIES = "give repetition_penalty, presence_penalty or frequency_penalty"
WHOLE = "leave it out; penalties look at the whole text"
TRUNCATIONS = "give top_k, top_p, min_p or typical_p"
TEMPLATE = "put a chat_template.jinja into the model's folder"
CONSTRAINT = "give response_format, regex or grammar"
SYSTEM = "give a system message"
CUT = "its name is truncate_prompt_tokens"
OF_TEXTS = "it is a field of /v1/completions"

# Fields of other servers: vLLM, SGLang, llama.cpp, TGI, Ollama, text-generation-webui, transformers, Mistral.
FOREIGN = refused(
    (ONE, LEAVE, "length_penalty guidance_scale"),
    (ZERO, LEAVE, "penalty_alpha min_keep n_indent"),
    (MINUS, LEAVE, "thinking_token_budget reasoning_budget_tokens"),
    (FALSE, LEAVE, "early_stopping watermark watermarking grammar_lazy impersonate"),
    (TRUE, LEAVE, "separate_reasoning stream_reasoning include_reasoning"),
    (EMPTY, LEAVE, "negative_prompt custom_params vllm_xargs grammar_triggers preserved_tokens image_data"),
    (EMPTY, LEAVE, "mm_processor_kwargs task"),
    (ONE, NO_BEAMS, "num_beams"),
    (FALSE, NO_BEAMS, "use_beam_search"),
    # truncation and temperature
    (TRUE, "give temperature 0", "do_sample"),
    (ZERO, TRUNCATIONS, "top_a epsilon_cutoff eta_cutoff xtc_probability mirostat mirostat_mode"),
    (ONE, TRUNCATIONS, "tfs tfs_z"),
    (LESS, TRUNCATIONS, "top_n_sigma"),
    (MINUS, TRUNCATIONS, "adaptive_target"),
    (ZERO, "give temperature", "dynatemp_range smoothing_factor"),
    (FALSE, "give temperature", "dynamic_temperature"),
    (FALSE, "leave it out; temperature comes before truncation", "temperature_last"),
    (EMPTY, "leave it out; the order of the transforms is that of transformers", "samplers sampler_priority"),
    (EMPTY, "give its options one by one", "preset generation_config"),
    (EMPTY, "give its members as fields of the request", "options"),
    # penalties
    (MINUS, WHOLE, "repeat_last_n"),
    (ZERO, WHOLE, "repetition_penalty_range"),
    (ZERO, PENALTIES, "dry_multiplier no_repeat_ngram_size"),
    (ONE, PENALTIES, "encoder_repetition_penalty"),
    (EMPTY, PENALTIES, "repetition_detection"),
    (EMPTY, "give logit_bias", "custom_logit_processor logits_processors custom_token_bans"),
    (MINUS, "its name is seed", "random_seed"),
    # where a text ends
    (EMPTY, "give stop, or regex for the whole text", "stop_regex"),
    (FALSE, "its name is include_stop_str_in_output", "no_stop_trim"),
    (FALSE, "its name is ignore_eos", "ban_eos_token"),
    (LESS, "give max_tokens", "t_max_predict_ms"),
    (FALSE, "give max_tokens", "auto_max_new_tokens"),
    (ZERO, CUT, "truncation_length"),
    (UNSET, CUT, "truncate"),
    # constraints
    (EMPTY, "its name is grammar", "grammar_string"),
    (UNSET, CONSTRAINT, "guided_whitespace_pattern"),
    (EMPTY, CONSTRAINT, "structural_tag"),
    (EMPTY, "its name is response_format", "format"),
    # the model and the prompt
    (EMPTY, "serve a model with its adapter merged", "lora lora_path adapter_id"),
    (EMPTY, "give the prompt as text or token ids", "prompt_embeds"),
    (EMPTY, "give token ids as the prompt of /v1/completions", "input_ids"),
    (EMPTY, "give the whole conversation", "session_params"),
    (TRUE, "give the prompt as token ids", "add_bos_token"),
    (EMPTY, TEMPLATE, "generation_prompt template chat_template_str instruction_template"),
    (EMPTY, TEMPLATE, "instruction_template_str"),
    ((None, "instruct"), TEMPLATE, "mode"),
    (EMPTY, SYSTEM, "character context user_bio chat_instruct_command tool_prompt guideline"),
    (FALSE, SYSTEM, "safe_prompt"),
    (EMPTY, "give it as a message", "greeting"),
    (FALSE, "its name is continue_final_message", "continue_"),
    (FALSE, "give the messages to /tokenize", "_debug_render_only"),
    # what the text shows, and its scores
    (TRUE, "leave it out; special tokens stand as they are", "spaces_between_special_tokens"),
    (FALSE, "its name is echo, of /v1/completions", "return_full_text"),
    (TRUE, "leave out tools", "parse_tool_calls"),
    (EMPTY, "give the number of the likeliest tokens as logprobs", "logprob_token_ids"),
    (FALSE, "its name is return_token_ids", "return_tokens_as_token_ids return_tokens"),
    (ZERO, "its name is logprobs", "n_probs top_n_tokens"),
    (FALSE, "leave it out; scores are by the model's logits", "post_sampling_probs"),
    (FALSE, "its name is prompt_logprobs", "decoder_input_details"),
    (ONE, "its name is n", "n_cmpl"),
)
# Fields of theirs that act only beside one of the table, or of those that requests honour.
DEPENDENT = frozenset(
    "xtc_threshold mirostat_tau mirostat_eta adaptive_decay dynatemp_exponent dynatemp_low dynatemp_high"
    " smoothing_curve dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
    " reasoning_budget_message reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags"
    " guided_decoding_backend bot_name name1 name2 user_name".split()
)
# Of chats and completions: what changes nothing here, and what is not supported.
HARMLESS = DEPENDENT | frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity"
    " reasoning_effort parallel_tool_calls request_id priority".split()
)
UNSUPPORTED = (
    refused(
        ((None, ""), LEAVE, "suffix"),
        (NO_LIST, LEAVE, "tools documents"),
        (WORDS, LEAVE, "tool_choice"),
        (NO_LIST, "its name is tools", "functions"),
        (WORDS, "its name is tool_choice", "function_call"),
        (UNSET, LEAVE, "audio web_search_options dimensions chat_template add_special_tokens"),
        ((None, ["text"]), LEAVE, "modalities"),
        (NO_LIST, "its name is ban", "bad_words"),
        ((None, [], ""), "its name is ban", "banned_strings"),
        (UNSET, OF_TEXTS, "prompt"),
        (FALSE, OF_TEXTS, "echo"),
        (UNSET, "it is a field of /v1/chat/completions", "messages"),
        (UNSET, "its name here is max_tokens", "max_completion_tokens"),
        (ZERO, "give their number as logprobs", "top_logprobs"),
        ((None, {}), LEAVE, "chat_template_kwargs"),
        (TRUE, LEAVE, "add_generation_prompt"),
        (FALSE, LEAVE, "continue_final_message"),
        (ZERO, "its name is min_tokens", "min_new_tokens"),
        (UNSET, "its name is max_tokens", "max_new_tokens"),
        (ONE, "its name is repetition_penalty", "repeat_penalty"),
        (UNSET, "its name is response_format", "json_schema"),
        (FALSE, "its name is response_format", "json_object"),
    )
    | FOREIGN
)
NOT_OF_ONE_TEXT = refused(
    (FALSE, LEAVE, "logprobs provenance return_token_ids"),
    (ONE, LEAVE, "n"),
    (UNSET, LEAVE, "prompt_logprobs"),
)
# Of POST /v1/responses, whose further fields are those of a chat.
OF_RESPONSES = frozenset(
    "store user service_tier max_tool_calls"
    " prompt_cache_key prompt_cache_retention safety_identifier stream_options".split()
)
NOT_OF_RESPONSES = NOT_OF_ONE_TEXT | refused(
    (UNSET, LEAVE, "previous_response_id conversation prompt messages max_tokens response_format"),
    (FALSE, LEAVE, "background"),
)
# Of POST /v1/messages, too.
OF_MESSAGES = frozenset("metadata service_tier container inference_geo cache_control".split())
NOT_OF_MESSAGES = NOT_OF_ONE_TEXT | refused(
    (NO_LIST, LEAVE, "mcp_servers"),
    (UNSET, LEAVE, "stop max_completion_tokens"),
)
# Of POST /tokenize and /detokenize.
OF_TOKENS = frozenset(("user", "request_id"))
NOT_OF_TOKENS = refused(
    (UNSET, LEAVE, "messages chat_template"),
    (FALSE, LEAVE, "return_token_strs skip_special_tokens with_pieces"),
    (TRUE, LEAVE, "parse_special"),
)


class StreamOptions(BaseModel, extra="ignore", strict=True):
    """What a stream sends beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel, extra="ignore", strict=True, populate_by_name=True):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel, extra="forbid", strict=True, populate_by_name=True):
    """The form of the text; a schema beside "json_object" is llama.cpp's spelling of "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class StructuredOutputs(BaseModel, extra="forbid", strict=True, populate_by_name=True):
    """The form of the text, as vLLM's requests give it."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class Prediction(BaseModel, extra="forbid", strict=True):
    """What the text will probably be."""

    type: Literal["content"]
    content: str | Items[dict[str, Any]]


class Form(NamedTuple):
    """The form of a text: the field that gives it, the option that it stands for, and its value."""

    field: str
    option: str
    value: Any


class Body(BaseModel, extra="allow", strict=True):
    """The base of all bodies. Fields that it does not declare are kept, and judged by two tables."""

    harmless: ClassVar[frozenset[str]]  # fields that change nothing here
    unsupported: ClassVar[Mapping[str, Refused]]  # fields that would change the output

    @classmethod
    def read(cls, body: object) -> Self:
        try:
            with without_collection():
                return cls.model_validate(body)
        except ValidationError as error:
            raise first_fault(error, body) from None

    @classmethod
    def chat_of(cls, body: object) -> ChatRequest | CompletionRequest:
        """Return the request of a body; errors as `read` and `chat`."""
        return cls.read(body).chat()

    def chat(self) -> ChatRequest | CompletionRequest:
        """Return the request in one of the two shapes that the server works with."""
        raise NotImplementedError

    def refuse_unsupported(self) -> None:
        for name, refused in self.unsupported.items():
            if (self.model_extra or {}).get(name) not in refused.off:
                message = f"{name} is not supported; {refused.instead}"
                raise invalid(name, message, code="unsupported_parameter")

    @property
    def further(self) -> dict[str, Any]:
        """The fields that no table knows."""
        known = self.harmless | self.unsupported.keys()
        return {name: value for name, value in (self.model_extra or {}).items() if name not in known}
