"""Options of the model, the drafter and the request, in the groups that `--help` shows.

None means that an option was not given, so the library's default applies. Choices and their help come from
the tables of `kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter, Token

from foredraft.cli.text_files import read_text
from foredraft.drafters.offered_copy import DEFAULT_COPY, OFFER
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS, POLICIES, RULES, DrafterKind, RuleKind, default_drafter

if TYPE_CHECKING:
    DrafterName: TypeAlias = str
    PolicyName: TypeAlias = str
    RuleName: TypeAlias = str
else:
    DrafterName = Literal[tuple(DRAFTERS)]
    PolicyName = Literal[tuple(POLICIES)]
    RuleName = Literal[tuple(RULES)]

__all__ = [
    "COMMON",
    "ChatOptions",
    "DocumentOptions",
    "DraftModelOptions",
    "DraftOptions",
    "DraftingOptions",
    "Flag",
    "ModelOptions",
    "OutputOptions",
    "SamplingOptions",
    "TargetOptions",
    "Threads",
    "bullets",
    "common",
    "load_options",
    "request_options",
]

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]  # off by default, without a --no- form
Repeatable = Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, show_default=False)]
# The options that most people need: all that `--help` shows. `--help-all` shows every option in its section.
COMMON = Group("Options", help="All options: --help-all.", sort_key=0)
MODEL = Group("Model", sort_key=1)
DRAFTING = Group("Drafting", sort_key=2)
SAMPLING = Group("Sampling", sort_key=3)
CHAT = Group("Chat", sort_key=5)
OUTPUT = Group("Output", sort_key=6)


def parse_threads(_: type, words: Sequence[Token]) -> int:
    """Parse a number of threads; what the library refuses is left to it."""
    word = words[0].value
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is no whole number; give one, as in --threads 4") from None


Threads = Annotated[int | None, Parameter(converter=parse_threads)]


def common(section: Group, **more: Any) -> Parameter:
    """Return the marker of an option that `--help` shows, too; `more` are other arguments of `Parameter`."""
    return Parameter(group=(COMMON, section), **more)


def bullets(lines: Mapping[str, str]) -> str:
    """Return one bullet per name, for the help of an option."""
    return "".join(f"- {name}: {line}\n" for name, line in lines.items())


def _summaries(kinds: Mapping[str, DrafterKind] | Mapping[str, RuleKind]) -> str:
    return bullets(
        {name: kind.summary + ("" if kind.lossless else " (not lossless)") for name, kind in kinds.items()}
    )


DRAFTER_HELP, RULE_HELP = _summaries(DRAFTERS), _summaries(RULES)
POLICY_HELP = bullets({name: kind.summary for name, kind in POLICIES.items()})
SETTINGS_HELP = bullets(
    {
        name: ", ".join(f"{key}={value.default}" for key, value in kind.settings.items())
        for name, kind in POLICIES.items()
        if kind.settings
    }
)
MAX_DRAFT_HELP = ", ".join(f"{kind.max_draft} with {name}" for name, kind in POLICIES.items())


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The options of the model that need no weights."""

    model: Annotated[str | None, common(MODEL)] = None
    """Target model: a folder, a GGUF file or a hub id (owner/name[:Q4_K_M]). Default: the demo models."""
    revision: str | None = None
    """Branch, tag or commit of --model on the Hugging Face Hub; same as --model owner/name@REVISION."""
    tokenizer: str | None = None
    """Folder of a tokenizer that takes the place of the model's own."""
    dtype: str | None = None
    """Dtype of the models: bfloat16, float16 or float32, for short bf16, fp16 or fp32. Default: the
    checkpoint's."""
    device: Annotated[str | None, common(MODEL)] = None
    """cpu, cuda or cuda:N. Default: cuda if there is one."""
    threads: Threads = None
    """CPU threads that compute. Default: the environment variable FOREDRAFT_THREADS, else OMP_NUM_THREADS,
    else the CPUs that the process may really use, which `foredraft info` shows."""


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True)
class ModelOptions(TargetOptions):
    """All options of the model."""

    weights: Literal["int4", "int8"] | None = None
    """Quantise the target's linear layers while loading, in groups of 32 weights; the quantised model is the
    target then. Default: as the checkpoint stores them."""
    max_batch: int | None = None
    """Maximum number of sequences in a batch. Default: as many as the command uses and memory allows."""
    max_length: int | None = None
    """Maximum tokens of a sequence, prompt and output together. Default: as many as the prompts need; with
    --chat of generate 8192 or more, or the model's maximum if that is lower."""
    truncate: Literal["left"] | None = None
    """Drop the oldest tokens of a prompt that is too long. Default: refuse the prompt."""
    deterministic: bool = True
    """Make forward passes of all shapes give the same bits, so that greedy output is identical to plain
    decoding's. --no-deterministic may be faster."""
    compile: Flag = False
    """Fuse the operations between matrix products with torch.compile. Needs a compiler, and seconds at the
    start. Meant for GPUs; on CPUs it replaces Foredraft's own kernels."""
    kernels: bool | None = None
    """Run layers with Foredraft's CPU kernels, which the wheel carries for most CPUs; elsewhere a C
    compiler builds them once. Default: on where the kernels are there and support the model."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """The options of the draft model that need no weights."""

    draft: Annotated[str | None, common(DRAFTING)] = None
    """Draft model: a folder, a GGUF file or a hub id."""
    draft_revision: str | None = None
    """Branch, tag or commit of --draft on the Hugging Face Hub."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftingOptions(DraftModelOptions):
    """All drafting options but --drafter, for commands that compare drafters."""

    plan: str | None = None
    """Layers that drafter layer-skip leaves out: a file of `foredraft tune`, exit:LAYER, or
    skip:attn=LAYERS/mlp=LAYERS with layers as in 3,5-7. Default: the plan that `foredraft tune` kept for this
    model, if any."""
    adapter: str | None = None
    """Folder of the adapter that drafter kangaroo uses, as `foredraft train adapter` wrote it. Default: the
    adapter that is kept for this model, if any."""
    draft_weights: Annotated[
        Literal["int4", "int8"] | None,
        Parameter(
            help="Make the copy of the target that drafter low-bit drafts with, in so many bits. Default:"
            f" {DEFAULT_COPY} with --drafter low-bit; else {OFFER}."
        ),
    ] = None
    policy: Annotated[
        PolicyName | None,
        Parameter(
            help=f"Decides the draft length.\n\n{POLICY_HELP}\nDefault: {next(iter(POLICIES))}.",
            show_choices=False,
        ),
    ] = None
    policy_option: Annotated[
        Repeatable,
        Parameter(help=f"NAME=VALUE sets a parameter of the policy; repeatable.\n\n{SETTINGS_HELP}"),
    ] = ()
    max_draft: Annotated[
        int | None,
        Parameter(
            help=f"Maximum draft length in tokens. Default: {MAX_DRAFT_HELP}; with layer-skip, the plan's,"
            " and with kangaroo, the adapter's, except under"
            f" {next(name for name, kind in POLICIES.items() if kind.uses_costs)}."
        ),
    ] = None
    draft_sampling: Literal["sampled", "greedy"] | None = None
    """How a draft model picks tokens: sampled with the parameters of the request (default), or greedy."""
    acceptance: Annotated[
        RuleName | None,
        Parameter(
            help=f"Acceptance rule.\n\n{RULE_HELP}\nDefault: coupled with --seed, else speculative; both are"
            " lossless.",
            show_choices=False,
        ),
    ] = None
    rollback: float | None = None
    """With --acceptance bild: reject the draft from the first token whose surprisal -log p under the target
    exceeds this many nats (5). 0 gives plain decoding's text at temperature 0, and keeps only tokens of
    probability 1 above it."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftOptions(DraftingOptions):
    """All drafting options, --drafter included."""

    drafter: Annotated[
        DrafterName | None,
        common(
            DRAFTING,
            show_choices=False,
            help=f"Proposes tokens.\n\n{DRAFTER_HELP}\nDefault: {default_drafter('auto')}; under a"
            " policy that decides about one drafter,"
            f" {default_drafter('fixed', ['adapter'])} with --adapter,"
            f" {default_drafter('fixed', ['plan'])} with --plan, else"
            f" {default_drafter('fixed', ['draft'])} if there is a draft model"
            f" ({default_drafter('fixed', ['draft'], ['draft-model'])} if its tokenizer differs), else"
            f" {default_drafter('fixed')} ({default_drafter('confidence')} if the policy needs"
            " draft probabilities).",
        ),
    ] = None


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of a request. None: the model's generation_config.json applies, else the value in brackets."""

    max_new_tokens: Annotated[int | None, common(SAMPLING)] = None
    """Maximum number of new tokens (128; with --chat as many as --max-length leaves); 0 only runs prefill,
    for --prompt-logprobs."""
    temperature: Annotated[float | None, common(SAMPLING)] = None
    """Sampling temperature (1; with --compare 0). 0 is greedy decoding: truncation and --seed then have no
    effect."""
    top_k: int | None = None
    """Sample from the k most likely tokens (0: off)."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities sum up to this value (1: off)."""
    min_p: float | None = None
    """Drop tokens whose probability is below this share of the most likely token's (0: off)."""
    typical_p: float | None = None
    """Locally typical sampling: keep the tokens whose surprisal is nearest to the entropy, up to this total
    probability (1: off)."""
    repetition_penalty: float | None = None
    """For tokens in the prompt or the output, divide positive logits and multiply negative ones by this value
    (1: off)."""
    presence_penalty: float | None = None
    """Subtract this value from the logits of tokens in the output (0: off)."""
    frequency_penalty: float | None = None
    """Subtract this value from a token's logit for each of its occurrences in the output (0: off)."""
    logit_bias: Repeatable = ()
    """ID=BIAS adds a bias from -100 to 100 to a token's logit; repeatable."""
    min_new_tokens: int | None = None
    """Suppress end-of-text tokens before this number of new tokens (0)."""
    ignore_eos: Flag = False
    """Generate past end-of-text tokens."""
    stop: Repeatable = ()
    """Stop string: the text ends before it; repeatable."""
    include_stop: Flag = False
    """Keep the stop string in the text."""
    prediction: Path | None = None
    """A file with what the text will probably be, such as a file before an edit; drafts copy it."""
    seed: Annotated[int | None, common(SAMPLING)] = None
    """Random seed, for reproducible text. Default: a fresh one, which the JSON document has."""
    n: int = 1
    """Number of samples of the prompt."""
    logprobs: int | None = None
    """With --json or --out: log-probabilities of the new tokens and of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """With --json or --out: the same for the prompt's tokens."""


@Parameter(name="*", group=CHAT)
@dataclass(frozen=True, slots=True)
class ChatOptions:
    chat: Annotated[Flag, common(CHAT)] = False
    """Send PROMPT as a user message in the model's chat template. Without PROMPT, on a terminal, hold a
    conversation: /help lists its commands, Ctrl-C ends a reply, /bye or Ctrl-D ends it."""
    system: str | None = None
    """With --chat: the system message."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """The options of every command for its JSON document; `output_files` honours them."""

    json: Annotated[Flag, common(OUTPUT)] = False
    """Print one JSON document instead of text, and nothing else on stdout."""
    out: Path | None = None
    """Write the JSON document to this file."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class OutputOptions(DocumentOptions):
    """The output options of `generate`. In the JSON document, seconds cover the whole request, prefill
    included; with --compare, they are those of a warm run."""

    compare: Annotated[Flag, common(OUTPUT)] = False
    """Also time plain decoding, in alternating runs, and report whether the outputs are identical."""
    trace: Path | None = None
    """Write an HTML page that shows for every token whether the drafter or the target wrote it, and every
    round."""
    show_special: Flag = False
    """Show special tokens, such as the end-of-text token."""
    color: bool = True
    """Colour each token by its origin, drafter or target, if stdout is a terminal."""


# Options that `foredraft.load` does not take under their own name.
NOT_LOADED = {"model", "truncate", "acceptance", "rollback", "policy_option"}


def load_options(model: ModelOptions, drafting: DraftingOptions) -> dict[str, Any]:
    """Return the given options that `foredraft.load` takes, by parameter name, without the model.

    Raises:
        ConfigError: --policy-option is malformed.
    """
    given = {name: value for name, value in (asdict(model) | asdict(drafting)).items() if value is not None}
    options = {name: given[name] for name in given.keys() - NOT_LOADED}
    if drafting.policy_option:
        options["policy_options"] = _parse_settings(drafting.policy_option)
    return options


def request_options(sampling: SamplingOptions, drafting: DraftingOptions) -> dict[str, Any]:
    """Return the given options of a request, by the field names of `SamplingParams`.

    Raises:
        ConfigError: --logit-bias is malformed, or the file of --prediction cannot be read.
    """
    given: dict[str, Any] = {
        name: value for name, value in asdict(sampling).items() if value not in (None, ())
    }
    del given["n"]
    if "logit_bias" in given:
        biases = list(map(_parse_bias, given["logit_bias"]))
        if len(dict(biases)) < len(biases):
            raise ConfigError(
                option="logit_bias", value=" ".join(given["logit_bias"]), remedy="give each token once"
            )
        given["logit_bias"] = dict(biases)
    if "prediction" in given:
        given["prediction"] = read_text("prediction", given["prediction"])
    for name in ("acceptance", "rollback"):
        if getattr(drafting, name) is not None:
            given[name] = getattr(drafting, name)
    return given


def _parse_bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(
            option="logit_bias", value=word, remedy="give ID=BIAS, a token id and a number"
        ) from None


def _parse_settings(words: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(option="policy_option", value=word, remedy="give NAME=VALUE")
        if name in settings:
            raise ConfigError(option="policy_option", value=" ".join(words), remedy="give each name once")
        settings[name] = value
    return settings
