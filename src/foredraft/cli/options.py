"""Options of the model, the draft and the text, by the groups in which `--help` shows them.

Contract: None means not given, so that the library's default holds. Choices and their help come from the
tables of `kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter

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
    "ChatOptions",
    "DraftOptions",
    "DraftingOptions",
    "Flag",
    "ModelOptions",
    "OutputOptions",
    "SamplingOptions",
    "loading",
    "requested",
]

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]  # one that is off unless given
Several = Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, show_default=False)]
MODEL = Group("Model", sort_key=1)
DRAFTING = Group("Drafting", sort_key=2)
SAMPLING = Group("Sampling", sort_key=3)
CHAT = Group("Chat", sort_key=4)
OUTPUT = Group("Output", sort_key=5)


def _described(kinds: Mapping[str, DrafterKind] | Mapping[str, RuleKind]) -> str:
    return "; ".join(
        f"{name}: {kind.summary}{'' if kind.lossless else ' (not lossless)'}" for name, kind in kinds.items()
    )


DRAFTER_HELP, RULE_HELP = _described(DRAFTERS), _described(RULES)
POLICY_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in POLICIES.items())
SETTINGS_HELP = "; ".join(
    f"{name}: {', '.join(f'{key}={value.default}' for key, value in kind.settings.items())}"
    for name, kind in POLICIES.items()
    if kind.settings
)
MAX_DRAFT_HELP = ", ".join(f"{kind.max_draft} with {name}" for name, kind in POLICIES.items())


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str | None = None
    """The target: a folder, or a Hugging Face id. Without it, the demo models that ship with Foredraft."""
    revision: str | None = None
    """Branch, tag or commit of --model on the hub; --model owner/name@REVISION says the same."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Arithmetic of the models; without it, what the checkpoint is stored as."""
    device: str | None = None
    """cpu, cuda, or cuda:N; without it, cuda where there is one."""
    max_batch: int | None = None
    """Sequences that are decoded side by side at most; without it, --n or as many as memory allows."""
    max_length: int | None = None
    """Room for prompt and output together, in tokens; without it, what this prompt needs, and for a
    conversation 8192 or all that the model has."""
    truncate: Literal["left"] | None = None
    """Drop the beginning of a prompt that is too long, instead of refusing it."""
    deterministic: bool = True
    """Keep to shapes whose results agree bit for bit, so that greedy output is plain decoding's."""
    compile: Flag = False
    """Fuse what lies between the layers' products with torch.compile, which takes a compiler and seconds at
    the beginning. Meant for GPUs; on CPUs it takes the place of the kernels."""
    kernels: bool | None = None
    """Run layers by Foredraft's own kernels, which a C compiler makes for this CPU, once; without it, where
    there is one and they serve the model."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """All but who drafts. None: not given, so the library's default holds."""

    draft: str | None = None
    """The draft model: a folder, or a Hugging Face id."""
    draft_revision: str | None = None
    """Branch, tag or commit of --draft on the hub."""
    plan: str | None = None
    """What of the model layer-skip leaves out: a file of `foredraft tune`, or exit:LAYER, or
    skip:attn=LAYERS/mlp=LAYERS with layers as in 3,5-7. Without it, the plan kept for this model, if any."""
    policy: Annotated[
        PolicyName | None,
        Parameter(help=f"How long a draft is. {POLICY_HELP}. Without it, {next(iter(POLICIES))}."),
    ] = None
    policy_option: Annotated[
        Several,
        Parameter(
            help=f"NAME=VALUE is a number of the policy's own; may be given several times. {SETTINGS_HELP}."
        ),
    ] = ()
    max_draft: Annotated[
        int | None,
        Parameter(
            help=f"Longest draft, in tokens. Without it, {MAX_DRAFT_HELP}; with layer-skip, the plan's, but"
            f" under {next(name for name, kind in POLICIES.items() if kind.uses_costs)}."
        ),
    ] = None
    draft_sampling: Literal["sampled", "greedy"] | None = None
    """How a model that drafts picks: as the target would (the default), or its likeliest token."""
    acceptance: Annotated[
        RuleName | None,
        Parameter(
            help=f"What is kept of a draft. {RULE_HELP}. Without it, coupled with --seed and speculative"
            " otherwise, which are lossless."
        ),
    ] = None
    rollback: float | None = None
    """With --acceptance bild: cut the draft at a token that surprises the target by more than so many nats,
    -log p (5). 0 keeps only what is certain."""


@Parameter(name="*", group=DRAFTING)
@dataclass(frozen=True, slots=True)
class DraftOptions(DraftingOptions):
    """Who drafts, too."""

    drafter: Annotated[
        DrafterName | None,
        Parameter(
            help=f"Who guesses ahead. {DRAFTER_HELP}. Without it,"
            f" {default_drafter(False, plan_given=True)} with --plan, {default_drafter(True)} where there is"
            f" a draft model, and {default_drafter(False)} otherwise."
        ),
    ] = None


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """None: not given, so the model's own default holds (generation_config.json), or what is in brackets."""

    max_new_tokens: int | None = None
    """Tokens to generate at most (128); 0 only reads the prompt, for --prompt-logprobs."""
    temperature: float | None = None
    """0 is greedy: cuts, seed and acceptance then change nothing (1; with --compare 0)."""
    top_k: int | None = None
    """Keep only the k likeliest tokens (0: off)."""
    top_p: float | None = None
    """Keep the likeliest tokens that make up this mass (1: off)."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest (0: off)."""
    typical_p: float | None = None
    """Keep the tokens whose surprise is nearest to the entropy, up to this mass (1: off)."""
    repetition_penalty: float | None = None
    """Divide positive logits of tokens in prompt or output by it, multiply negative ones (1: off)."""
    presence_penalty: float | None = None
    """Take this off the logits of tokens in the output (0: off)."""
    frequency_penalty: float | None = None
    """Take this off the logits of tokens in the output as often as they occur there (0: off)."""
    logit_bias: Several = ()
    """ID=BIAS adds to a token's logit, from -100 to 100; may be given several times."""
    min_new_tokens: int | None = None
    """Bar the end of the text before so many tokens (0)."""
    ignore_eos: Flag = False
    """Go on past the end-of-text token."""
    stop: Several = ()
    """End the text before this string; may be given several times."""
    include_stop: Flag = False
    """Leave the stop string in the text."""
    seed: int | None = None
    """For a text that can be had again; without it a fresh one, which --json reports."""
    n: int = 1
    """Samples of the prompt."""
    logprobs: int | None = None
    """With --json: log-probabilities of the new tokens and of so many of the likeliest."""
    prompt_logprobs: int | None = None
    """With --json: the same of the prompt's tokens."""


@Parameter(name="*", group=CHAT)
@dataclass(frozen=True, slots=True)
class ChatOptions:
    chat: Flag = False
    """Take PROMPT as a user's message, and put it into the model's chat template. Without PROMPT, on a
    terminal, keep a conversation: /reset forgets it, /exit or Ctrl-D ends it, Ctrl-C ends a reply."""
    system: str | None = None
    """With --chat: the system's message, which comes first."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class OutputOptions:
    compare: Flag = False
    """Also time plain decoding, in alternation, and say whether the outputs are identical."""
    json: Flag = False
    """Print one JSON document instead of text. Its seconds are the whole request's, the prompt included;
    with --compare, those of a warm run."""
    trace: Path | None = None
    """Write an HTML page here that shows who wrote each token and what every round did."""
    show_special: Flag = False
    """Show special tokens, such as the end-of-text token, instead of leaving them out."""
    color: bool = True
    """Colour the text by who wrote it, where stdout is a terminal."""


def loading(model: ModelOptions, drafting: DraftingOptions) -> dict[str, Any]:
    """What of them `foredraft.load` takes."""
    given = {name: value for name, value in (asdict(model) | asdict(drafting)).items() if value is not None}
    elsewhere = {"model", "truncate", "acceptance", "rollback", "policy_option"}
    options = {name: given[name] for name in given.keys() - elsewhere}
    if drafting.policy_option:
        options["policy_options"] = _settings(drafting.policy_option)
    return options


def requested(sampling: SamplingOptions, drafting: DraftingOptions) -> dict[str, Any]:
    """What of them is a request's own: the options given, by the names of `SamplingParams`."""
    given: dict[str, Any] = {
        name: value for name, value in asdict(sampling).items() if value not in (None, ())
    }
    del given["n"]
    if "logit_bias" in given:
        biases = list(map(_bias, given["logit_bias"]))
        if len(dict(biases)) < len(biases):
            raise ConfigError(f"logit_bias is {' '.join(given['logit_bias'])}; give each token once")
        given["logit_bias"] = dict(biases)
    for name in ("acceptance", "rollback"):
        if getattr(drafting, name) is not None:
            given[name] = getattr(drafting, name)
    return given


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ConfigError(f"logit_bias is {word!r}; give ID=BIAS, a token's id and a number") from None


def _settings(words: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, each name once."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"policy_option is {word!r}; give NAME=VALUE")
        if name in settings:
            raise ConfigError(f"policy_option is {' '.join(words)}; give each name once")
        settings[name] = value
    return settings
