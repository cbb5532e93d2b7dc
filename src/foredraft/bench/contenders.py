"""The table of contenders, by the names that users give, and the optional packages that they need.

The command line, its help and its checks read the table. PyTorch is imported when a contender is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigError, Option, did_you_mean
from foredraft.kinds.compatibility import missing_part, suits
from foredraft.kinds.tables import DRAFTERS, POLICIES, RULES

if TYPE_CHECKING:
    from foredraft.bench.contender import BenchContext, Contender
    from foredraft.llm import LLM


INSTALL = {"llama_cpp": "pip install llama-cpp-python", "optuna": "pip install 'foredraft[tune]'"}


def module(name: str, needed_by: str) -> Any:
    """Import and return an optional module."""
    try:
        return import_module(name)
    except ImportError as error:
        install = INSTALL.get(name, "pip install 'foredraft[bench]'")
        problem = f"{needed_by} needs {name}, which cannot be imported ({error})"
        raise ConfigError(problem, remedy=install) from None


ALL = "all"
PLAIN = "plain"  # the contender that all others are compared with: decoding without a drafter
BILD_POLICY = "fallback"  # of Big Little Decoder as published (Kim et al. 2023, arXiv:2302.07863)


@dataclass(frozen=True, slots=True)
class Program:
    """A program whose contenders share its loaded models."""

    load: Callable[[BenchContext], Any]  # loads the models; raises ConfigError if it cannot run them
    package: str | None = None  # the distribution to install; None for Foredraft itself
    install: str = ""  # the command that installs it

    @property
    def version(self) -> str | None:
        """The installed version; None if the package is not installed, or for Foredraft itself."""
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def installed(self) -> bool:
        return self.package is None or self.version is not None


@dataclass(frozen=True, slots=True)
class ContenderKind:
    """One line of the table of contenders."""

    summary: str  # one line for the command line's help
    program: str  # the key of its program in `PROGRAMS`
    make: Callable[[Any, BenchContext], Contender]  # from its program's models; may raise ConfigError
    policies: tuple[str, ...] = ()  # that it can run under; none for plain decoding and other programs
    lossless: bool = True  # the output has exactly the target's distribution; "all" leaves others out
    scored: bool = False  # the benchmark tells how likely the target finds the texts of all contenders


def _module(name: str) -> Any:
    return import_module(f"foredraft.bench.{name}")  # on first use


PROGRAMS: dict[str, Program] = {
    "foredraft": Program(lambda context: context.llm),
    "transformers": Program(
        lambda context: _module("hugging_face").TransformersModels(context),
        "transformers",
        "pip install 'foredraft[bench]'",
    ),
    "llama.cpp": Program(
        lambda context: _module("llama_cpp").LlamaCpp(context),
        "llama-cpp-python",
        "pip install llama-cpp-python",
    ),
}


def _make_foredraft(drafter: str, name: str, llm: LLM, context: BenchContext) -> Contender:
    kind, policy = DRAFTERS[drafter], llm.loaded.engine.policy.name
    if kind.asset is not None and drafter not in context.drafters:
        raise missing_part(drafter, name)
    if kind.chooses and not suits(drafter, policy):
        raise ConfigError(
            f"{name} needs a policy that chooses among drafters", remedy=("give ", Option("policy", "auto"))
        )
    if kind.asset is not None and not suits(drafter, policy):
        raise ConfigError(
            (f"{name} cannot follow ", Option("policy", policy)), remedy=("give another ", Option("policy"))
        )
    made: Contender = _module("contender").ForedraftContender(
        name, llm, drafter, temperature=context.temperature, acceptance=context.acceptance,
        policy=context.policy_for(drafter, policy),
    )  # fmt: skip
    return made


def _make_bild(llm: LLM, context: BenchContext) -> Contender:
    if "draft-model" not in context.drafters:
        raise missing_part("draft-model", "bild")
    policy = context.policy_for("draft-model", BILD_POLICY)
    made: Contender = _module("contender").ForedraftContender(
        "bild", llm, "draft-model", temperature=context.temperature, acceptance="bild", policy=policy
    )
    return made


def _make_transformers(name: str, models: Any, context: BenchContext) -> Contender:
    made: Contender = _module("hugging_face").Generate(name, models, context)
    return made


CONTENDERS: dict[str, ContenderKind] = {
    **{
        name: ContenderKind(
            DRAFTERS[drafter].summary,
            "foredraft",
            partial(_make_foredraft, drafter, name),
            policies=tuple(policy for policy in POLICIES if drafter != "none" and suits(drafter, policy)),
            lossless=DRAFTERS[drafter].lossless,
        )
        for drafter in DRAFTERS
        if not DRAFTERS[drafter].by_request
        for name in (PLAIN if drafter == "none" else drafter,)
    },
    "bild": ContenderKind(
        "Big Little Decoder: accepts drafted tokens that the target finds likely enough (lossy; only if"
        " named)",
        "foredraft",
        _make_bild,
        policies=(BILD_POLICY,),
        lossless=RULES["bild"].lossless,
    ),
    **{
        name: ContenderKind(summary, "transformers", partial(_make_transformers, name))
        for name, summary in {
            "transformers": "generate of transformers",
            "transformers-assisted": "generate with assistant_model",
            "transformers-lookup": "generate with prompt_lookup_num_tokens",
        }.items()
    },
    "beam": ContenderKind(
        "beam search by generate: a likely text, no accelerator (lossy; only if named)",
        "transformers",
        partial(_make_transformers, "beam"),
        lossless=False,
        scored=True,
    ),
    "llama.cpp": ContenderKind(
        "llama.cpp on the same weights",
        "llama.cpp",
        lambda contender, context: contender,  # llama.cpp has one contender, which its program loads whole
    ),
}


def resolve_methods(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the contenders that take part, with plain decoding first."""
    lossless = tuple(name for name, kind in CONTENDERS.items() if kind.lossless)
    names = (ALL,) if names is None else names
    found = _resolved(CONTENDERS, lossless, "methods", names)
    for program in (PROGRAMS[CONTENDERS[name].program] for name in names if name != ALL):
        if not program.installed:
            problem = f"but {program.package} is not installed"
            raise ConfigError(problem, option="methods", value=",".join(names), remedy=program.install)
    return tuple(dict.fromkeys((PLAIN, *found)))


def resolve_policies(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the policies; "all" stands for every one."""
    return tuple(_resolved(POLICIES, POLICIES, "policies", names))


def check_policy(methods: tuple[str, ...] | None, policy: str | None, max_draft: int | None) -> None:
    """Refuse a policy or a longest draft that no contender would follow."""
    followed = {name for method in resolve_methods(methods) for name in CONTENDERS[method].policies}
    if policy in POLICIES and policy not in followed:
        problem = "but none of the methods can follow it"
        raise ConfigError(problem, option="policy", value=policy, remedy="leave it out")
    if max_draft is not None and not followed:
        raise ConfigError(
            "but none of the methods drafts", option="max_draft", value=max_draft, remedy="leave it out"
        )


def _resolved(
    table: Collection[str], everything: Iterable[str], option: str, names: tuple[str, ...]
) -> dict[str, None]:
    """Return the names in order, with everything for "all"; refuse what is not in the table."""
    found: dict[str, None] = {}
    for name in names:
        if name != ALL and name not in table:
            raise ConfigError(
                f"but there is no {name!r}", option=option, value=",".join(names),
                remedy=f"give {ALL}, or some of {', '.join(table)}{did_you_mean(name, (ALL, *table))}",
            )  # fmt: skip
        found |= dict.fromkeys(everything if name == ALL else (name,))
    return found
