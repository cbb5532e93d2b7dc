"""The table of contenders, by the names that users give.

Contract: a new contender is one file and one line here; the command line, its help and its checks read the
table. Nothing here imports PyTorch before something is made, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.bench.records import PLAIN
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS, POLICIES, RULES, suits

if TYPE_CHECKING:
    from foredraft.bench.contender import BenchContext, Contender

__all__ = [
    "ALL",
    "CONTENDERS",
    "PROGRAMS",
    "ContenderKind",
    "Program",
    "check_policy",
    "chosen",
    "deciding",
]

ALL = "all"
BIG_LITTLE = "fallback"  # the policy of Big Little Decoder as published
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Program:
    """Whose contenders share what is loaded. package: as it is installed; install: how.
    load: what its contenders are made of; may raise ConfigError where it cannot run these models."""

    load: Callable[[BenchContext], Any]
    package: str | None = None
    install: str = ""

    @property
    def version(self) -> str | None:
        """None: it is not installed, or Foredraft itself."""
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def missing(self) -> str | None:
        """Why it cannot be had here."""
        if self.package is None or self.version is not None:
            return None
        return f"{self.package} is not installed; {self.install}"


@dataclass(frozen=True, slots=True)
class ContenderKind:
    """A line of the table. make: of what its program loaded; may raise ConfigError, as `Program.load`.
    policies: those that it can follow; plain decoding and peers follow none. lossless: its output has the
    model's own law; what has not takes part only where it is named."""

    summary: str
    program: str
    make: Callable[[Any, BenchContext], Contender]
    policies: tuple[str, ...] = ()
    lossless: bool = True


def _in(module: str) -> Any:
    """The names in a module, which is imported now."""
    return import_module(f"foredraft.bench.{module}")


PROGRAMS: dict[str, Program] = {
    "foredraft": Program(lambda setting: setting.llm),
    "transformers": Program(
        lambda setting: _in("hugging_face").Checkpoints(setting),
        "transformers",
        "pip install 'foredraft[bench]'",
    ),
    "llama.cpp": Program(
        lambda setting: _in("llama_cpp").LlamaCpp(setting), "llama-cpp-python", "pip install llama-cpp-python"
    ),
}


def _ours(drafter: str, name: str, llm: Any, setting: BenchContext) -> Contender:
    kind, policy = DRAFTERS[drafter], llm.engine.policy.name
    if kind.make is not None and drafter not in setting.drafters:
        if kind.needs_plan:
            raise ConfigError(
                f"{name} has no plan for this model; make one with `foredraft tune`, or give plan="
            )
        has = "the target's" if drafter == "draft-model" else "another"
        raise ConfigError(f"{name} needs a draft model with {has} tokenizer; give draft=")
    if kind.chooses and not suits(drafter, policy):
        raise ConfigError(f"{name} needs a policy that chooses; give policy='auto'")
    if kind.make is not None and not suits(drafter, policy):
        raise ConfigError(f"{name} cannot follow policy='{policy}'; give another")
    made: Contender = _in("foredraft_contender").ForedraftContender(
        name,
        llm,
        drafter,
        lossless=kind.lossless,
        temperature=setting.temperature,
        coupled=setting.coupled,
        decides=setting.policy(drafter, policy),
    )
    return made


def _big_little(llm: Any, setting: BenchContext) -> Contender:
    if "draft-model" not in setting.drafters:
        raise ConfigError("bild needs a draft model with the target's tokenizer; give draft=")
    made: Contender = _in("foredraft_contender").BigLittle(
        llm, setting.policy("draft-model", BIG_LITTLE), temperature=setting.temperature
    )
    return made


CONTENDERS: dict[str, ContenderKind] = {
    **{
        name: ContenderKind(
            DRAFTERS[drafter].summary,
            "foredraft",
            partial(_ours, drafter, name),
            policies=tuple(policy for policy in POLICIES if drafter != "none" and suits(drafter, policy)),
            lossless=DRAFTERS[drafter].lossless,
        )
        for drafter in DRAFTERS
        for name in (PLAIN if drafter == "none" else drafter,)
    },
    "bild": ContenderKind(
        "Big Little Decoder: the draft stands unless it surprises the target (not lossless; only if named)",
        "foredraft",
        _big_little,
        policies=(BIG_LITTLE,),
        lossless=RULES["bild"].lossless,
    ),
    "transformers": ContenderKind(
        "generate of transformers",
        "transformers",
        lambda models, setting: _in("hugging_face").plain(models, setting),
    ),
    "transformers-assisted": ContenderKind(
        "generate with assistant_model",
        "transformers",
        lambda models, setting: _in("hugging_face").assisted(models, setting),
    ),
    "transformers-lookup": ContenderKind(
        "generate with prompt_lookup_num_tokens",
        "transformers",
        lambda models, setting: _in("hugging_face").prompt_lookup(models, setting),
    ),
    "llama.cpp": ContenderKind(
        "llama.cpp on the same weights",
        "llama.cpp",
        lambda contender, setting: contender,  # the only one, so it is what its program loads
    ),
}


def chosen(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The contenders of these names, plain always among them and first. "all", or None: every lossless one.

    Raises ConfigError that names one that is unknown, or whose program is not installed.
    """
    lossless = tuple(name for name, kind in CONTENDERS.items() if kind.lossless)
    names = (ALL,) if names is None else names
    for name in names:
        if name != ALL and (missing := PROGRAMS[_known(CONTENDERS, "methods", names, name).program].missing):
            raise ConfigError(f"methods is {','.join(names)!r}, but {missing}")
    return tuple(dict.fromkeys((PLAIN, *_spread(names, lossless))))


def deciding(names: tuple[str, ...]) -> tuple[str, ...]:
    """The policies of these names; "all" is every one. Raises ConfigError that names one that is unknown."""
    for name in names:
        if name != ALL:
            _known(POLICIES, "policies", names, name)
    return tuple(dict.fromkeys(_spread(names, POLICIES)))


def check_policy(methods: tuple[str, ...] | None, policy: str | None, max_draft: int | None) -> None:
    """Raises ConfigError where it was said how far to draft, but nobody who takes part would heed it."""
    heeding = {name for method in chosen(methods) for name in CONTENDERS[method].policies}
    if policy in POLICIES and policy not in heeding:  # what is no policy is for `load` to name
        raise ConfigError(f"policy is {policy!r}, but none of the methods can follow that; leave it out")
    if max_draft is not None and not heeding:
        raise ConfigError(f"max_draft is {max_draft}, but none of the methods heeds that; leave it out")


def _known(table: Mapping[str, K], option: str, names: tuple[str, ...], name: str) -> K:
    if name not in table:
        raise ConfigError(
            f"{option} is {','.join(names)!r}, but there is no {name!r}; give {ALL}, or some of"
            f" {', '.join(table)}"
        )
    return table[name]


def _spread(names: Iterable[str], everything: Iterable[str]) -> Iterator[str]:
    """ "all" as what it stands for."""
    for name in names:
        yield from everything if name == ALL else (name,)
