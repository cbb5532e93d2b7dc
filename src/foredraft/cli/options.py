"""Options of the model, the drafter and the request, in the sections that `--help-all` shows.

Most are declared by the library (`SamplingParams`, `LoadOptions`); choices of drafters, policies and rules
come with the help of the tables of `kinds`. Constraints of the text have other forms here: files, and choices
one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter, Token

from foredraft.arguments import declared
from foredraft.bench.workload import PromptForm
from foredraft.cli.prompts import read_text
from foredraft.cli.sections import COMMON, Given, Repeatable, declared_in, derived, option, section
from foredraft.decode.params import GRAMMARS, SamplingParams
from foredraft.errors import ConfigError, Option
from foredraft.kinds.compatibility import asset_options, check_effects, default_drafter
from foredraft.kinds.load_options import LoadOptions
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES, DrafterKind, RuleKind

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]  # off by default, without a --no- form
MODEL = Group("Model", sort_key=1)
DRAFTING = Group("Drafting", sort_key=2)
SAMPLING = Group(
    "Sampling", help="The model's own defaults (generation_config.json) go before these.", sort_key=3
)
CHAT = Group("Chat", sort_key=5)
OUTPUT = Group("Output", sort_key=6)


HTML = {"html": option(Path, "Write a report with plots to this file, one self-contained page.")}


def parse_threads(_: type, words: Sequence[Token]) -> int:
    """Parse a number of threads; what the library refuses is left to it."""
    word = words[0].value
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is no whole number; give one, as in --threads 4") from None


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


def _choice(names: Mapping[str, Any], help: str) -> Any:
    """Return the type of an option that names a kind; its help has a line for each."""
    return option(Literal[tuple(names)], help, show_choices=False)


POLICY_HELP = bullets({name: kind.summary for name, kind in POLICIES.items()})
SETTINGS_HELP = bullets(
    {
        name: ", ".join(f"{key}={value.default}" for key, value in kind.settings.items())
        for name, kind in POLICIES.items()
        if kind.settings
    }
)
MAX_DRAFT = ", ".join(f"{kind.max_draft} with {name}" for name, kind in POLICIES.items())
COMPARES = next(name for name, kind in POLICIES.items() if kind.uses_costs)

THREADS = derived(
    "threads",
    default="the environment variable FOREDRAFT_THREADS, else OMP_NUM_THREADS, else the CPUs that the process"
    " may really use, which `foredraft info` shows",
)
TARGET = derived("model", "revision", "lora", "tokenizer", "dtype", "device") | {
    name: Annotated[kind, Parameter(converter=parse_threads)] for name, kind in THREADS.items()
}
SOURCE = {name: TARGET[name] for name in ("model", "revision", "lora", "dtype", "threads")} | {
    **derived("model", default="the demo target"),
    **derived("dtype", more="It is that of weights which are not coded."),
}
DRAFT = derived("draft", "draft_revision")
DRAFTED = (
    derived("plan", "adapter", "draft_weights")
    | {
        "policy": _choice(
            POLICIES, f"Decides the draft length.\n\n{POLICY_HELP}\nDefault: {next(iter(POLICIES))}."
        ),
        "policy_option": option(
            Repeatable, f"NAME=VALUE sets a parameter of the policy; repeatable.\n\n{SETTINGS_HELP}"
        ),
    }
    | derived(
        "max_draft",
        default=f"{MAX_DRAFT}; with layer-skip, the plan's, and with kangaroo, the adapter's, except under"
        f" {COMPARES}; with suffix 24",
    )
    | derived("draft_sampling")
    | {
        "acceptance": _choice(
            RULES,
            f"Acceptance rule.\n\n{_summaries(RULES)}\nDefault: coupled with --seed, else speculative;"
            " both are lossless.",
        )
    }
    | derived("rollback")
)
# Not of commands that measure: those repeat their requests, and would find those of the time before.
TEXTS = derived("recent_texts", "texts_file")
PREFIXES = derived("prefix_folder")
DRAFTER = {
    "drafter": _choice(
        DRAFTERS,
        f"Proposes tokens.\n\n{_summaries(DRAFTERS)}\nDefault: {default_drafter('auto')}; under a"
        " policy that decides about one drafter,"
        f" {default_drafter('fixed', ['adapter'])} with --adapter,"
        f" {default_drafter('fixed', ['plan'])} with --plan, else"
        f" {default_drafter('fixed', ['draft'])} if there is a draft model"
        f" ({default_drafter('fixed', ['draft'], ['draft-model'])} if its tokenizer differs), else"
        f" {default_drafter('fixed')} ({default_drafter('confidence')} if the policy needs"
        " draft probabilities).",
    )
}
# What is neither of these, nor in another form here, is an option of the model.
NOT_BOUNDS = {*TARGET, *DRAFT, *DRAFTED, *DRAFTER, *TEXTS, *PREFIXES, "policy_options", "progress"}
BOUNDS = {
    **derived(*(name for name in declared(LoadOptions) if name not in NOT_BOUNDS)),
    **derived("max_batch", default="as many as the command uses and memory allows"),
    **derived(
        "max_length",
        default="as many as the prompts need; with --chat of generate 8192 or more, or the model's maximum if"
        " that is lower",
    ),
    **derived("deterministic", more="--no-deterministic may be faster."),
    "truncate": option(
        Literal["left"], "Drop the oldest tokens of a prompt that is too long. Default: refuse the prompt."
    ),
}
# Options of a request that say which texts are allowed; `constraint_options` has them.
CONSTRAINED = (*(name for name in declared(SamplingParams) if name.startswith("ban")), *GRAMMARS)
# Options of a request in which the command line has those of `load`, or that stand with the drafter.
NOT_SAMPLED = {*CONSTRAINED, *declared(LoadOptions), "acceptance", "rollback"}
SCORES = "Needs --json or --out."
REQUEST = (
    derived(*(name for name in declared(SamplingParams) if name not in NOT_SAMPLED))
    | derived("max_new_tokens", default="128; with --chat as many as --max-length leaves")
    | derived("temperature", default="1; with --compare 0")
    | derived("logprobs", "prompt_logprobs", more=SCORES)
    | derived("seed", default="a fresh one, which the JSON document has")
    | {
        "logit_bias": option(
            Repeatable, "ID=BIAS adds a bias from -100 to 100 to a token's logit; repeatable."
        ),
        "prediction": option(
            Path, "A file with what the text will probably be, such as a file before an edit; drafts copy it."
        ),
        "n": option(int, "Number of samples of the prompt. Default: 1."),
    }
)

if TYPE_CHECKING:
    SourceOptions: TypeAlias = Given
    TargetOptions: TypeAlias = Given
    ModelOptions: TypeAlias = Given
    DraftModelOptions: TypeAlias = Given
    DraftingOptions: TypeAlias = Given
    DraftOptions: TypeAlias = Given
    TextsOptions: TypeAlias = Given
    PrefixOptions: TypeAlias = Given
    SamplingOptions: TypeAlias = Given
else:
    SourceOptions = section("SourceOptions", MODEL, SOURCE, ["model"])
    TargetOptions = section("TargetOptions", MODEL, TARGET, ["model", "device"])
    ModelOptions = section("ModelOptions", MODEL, TARGET | BOUNDS, ["model", "device"])
    DraftModelOptions = section("DraftModelOptions", DRAFTING, DRAFT, ["draft"])
    DraftingOptions = section("DraftingOptions", DRAFTING, DRAFT | DRAFTED, ["draft"])
    DraftOptions = section("DraftOptions", DRAFTING, DRAFT | DRAFTED | DRAFTER, ["draft", "drafter"])
    TextsOptions = section("TextsOptions", DRAFTING, TEXTS)
    PrefixOptions = section("PrefixOptions", MODEL, PREFIXES)
    SamplingOptions = section("SamplingOptions", SAMPLING, REQUEST, ["max_new_tokens", "temperature", "seed"])


@Parameter(name="*", group=CHAT)
@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How the prompts of a command become token ids."""

    chat: Flag = False
    """Send each prompt as a user message in the model's chat template, as generate --chat does."""
    system: str | None = None
    """With --chat: the system message."""

    @property
    def form(self) -> PromptForm:
        return PromptForm(self.chat, self.system)


@Parameter(name="*", group=CHAT)
@dataclass(frozen=True, slots=True)
class ChatOptions(PromptOptions):
    chat: Annotated[Flag, common(CHAT)] = False
    """Send PROMPT as a user message in the model's chat template. Without PROMPT, on a terminal, hold a
    conversation: /help lists its commands, Ctrl-C ends a reply, /bye or Ctrl-D ends it."""


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """The options of every command for its JSON document; `words` honours them."""

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


def load_options(*sections: Given) -> dict[str, Any]:
    """Return the given options that `foredraft.load` takes, by parameter name, without the model."""
    given = {name: value for each in sections for name, value in each.items()}
    options = declared_in(LoadOptions, given)
    options.pop("model", None)
    words, settings = given.get("policy_option", ()), dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(option="policy_option", value=word, remedy="give NAME=VALUE")
        if name in settings:
            raise ConfigError(option="policy_option", value=" ".join(words), remedy="give each name once")
        settings[name] = value
    return options | ({"policy_options": settings} if words else {})


def request_options(*sections: Given) -> dict[str, Any]:
    """Return the given options of a request, by the field names of `SamplingParams`."""
    given = {name: value for each in sections for name, value in each.items()}
    options = declared_in(SamplingParams, given)
    for name in declared(LoadOptions):  # those of loading serve all requests of a command
        options.pop(name, None)
    if "logit_bias" in options:
        words, biases = options["logit_bias"], dict[int, float]()
        for word in words:
            token, _, bias = word.partition("=")
            try:
                biases[int(token)] = float(bias)
            except ValueError:
                remedy = "give ID=BIAS, a token id and a number"
                raise ConfigError(option="logit_bias", value=word, remedy=remedy) from None
        if len(biases) < len(words):
            raise ConfigError(option="logit_bias", value=" ".join(words), remedy="give each token once")
        options["logit_bias"] = biases
    if "prediction" in options:
        options["prediction"] = read_text("prediction", options["prediction"])
    return options


OTHER_FORM = ("ban_file", "choice")  # in place of the library's options, or beside them
CONSTRAINTS = {
    **derived("ban"),
    "ban_file": option(Path, "A UTF-8 file with one banned text in each line."),
    **derived(*(name for name in CONSTRAINED if name not in GRAMMARS), "regex"),
    "choice": option(Repeatable, "A string that the whole text may be; repeatable: the text is one of them."),
    **derived(*(name for name in GRAMMARS if name not in ("regex", "choices"))),
    "json_schema": option(
        str, "The JSON schema of the text: a file, or the schema itself, which begins with {."
    ),
    "grammar": option(
        Path, "A file with a context-free grammar of the text, in llguidance's Lark dialect or in GBNF."
    ),
}

if TYPE_CHECKING:
    ConstraintOptions: TypeAlias = Given
else:
    ConstraintOptions = section("ConstraintOptions", Group("Constraints", sort_key=4), CONSTRAINTS)


def constraint_options(given: Given) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if name not in OTHER_FORM}
    if "choice" in given:
        options["choices"] = [*given["choice"]]
    if "json_schema" in given and not given["json_schema"].lstrip().startswith("{"):
        options["json_schema"] = read_text("json_schema", Path(given["json_schema"]))
    if "grammar" in given:
        options["grammar"] = read_text("grammar", given["grammar"])
    banned = [*given.get("ban", ())]
    if "ban_file" in given:
        lines = [line for line in read_text("ban_file", given["ban_file"]).splitlines() if line]
        if not lines:
            file, remedy = str(given["ban_file"]), "give one text a line"
            raise ConfigError("which is empty", option="ban_file", value=file, remedy=remedy)
        banned += lines
    if banned:
        options["ban"] = banned
    else:
        for name in options:
            if name.startswith("ban_"):
                raise ConfigError("has nothing to ban", option=name, remedy=("give ", Option("ban")))
    return options


def check_drafting_options(model: Given, drafting: Given, *, compare: bool = False) -> None:
    check_effects(
        drafter_name(drafting, model),
        compare=compare,
        options=["policy_options" if name == "policy_option" else name for name in drafting],
        policy=drafting.get("policy"),
        rule=drafting.get("acceptance"),
    )


def refuse_lossy(drafting: Given) -> None:
    """Refuse a lossy acceptance rule, for commands that compare the output with plain decoding's."""
    rule = drafting.get("acceptance")
    if rule is not None and not RULES[rule].lossless:
        raise ConfigError(
            "which is not lossless, so its output cannot be compared with plain decoding's",
            option="acceptance",
            value=rule,
            remedy="leave it out",
        )
    if "rollback" in drafting:
        raise ConfigError(
            ("applies only to ", Option("acceptance", "bild"), ", which is not lossless"),
            option="rollback",
            remedy="leave it out",
        )


def drafter_name(drafting: Given, model: Given) -> str:
    given = {*asset_options()} & drafting.keys()
    if "model" not in model:
        given.add("draft")  # of the demo models
    return drafting.get("drafter") or default_drafter(drafting.get("policy", "auto"), given)
