"""The table of contenders, by the names that users give.

Contract: a new contender is one file and one line here; the command line, its help and its checks read the
table. Nothing here imports PyTorch before something is made, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from foredraft.bench.records import PLAIN
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS, POLICIES

if TYPE_CHECKING:
    from foredraft.bench.contender import Contender, Setting

__all__ = ["CONTENDERS", "PROGRAMS", "ContenderKind", "Program", "chosen", "suits"]


@dataclass(frozen=True, slots=True)
class Program:
    """Whose contenders share what is loaded. package: as it is installed; install: how.
    load: what its contenders are made of; may raise ConfigError where it cannot run these models."""

    load: Callable[[Setting], Any]
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
    """A line of the table. make: of what its program loaded; may raise ConfigError, as `Program.load`."""

    summary: str
    program: str
    make: Callable[[Any, Setting], Contender]


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


def _ours(drafter: str, name: str, llm: Any, setting: Setting) -> Contender:
    if DRAFTERS[drafter].chooses:
        if not llm.engine.policy.weighs:
            raise ConfigError(f"{name} needs a policy that chooses; give policy='auto'")
    elif DRAFTERS[drafter].needs_plan and drafter not in setting.drafters:
        raise ConfigError(f"{name} has no plan for this model; make one with `foredraft tune`, or give plan=")
    elif drafter != "none" and drafter not in setting.drafters:
        has = "the target's" if drafter == "draft-model" else "another"
        raise ConfigError(f"{name} needs a draft model with {has} tokenizer; give draft=")
    made: Contender = _in("ours").Ours(
        name,
        llm,
        drafter,
        lossless=DRAFTERS[drafter].lossless,
        temperature=setting.temperature,
        coupled=setting.coupled,
    )
    return made


def _big_little(llm: Any, setting: Setting) -> Contender:
    if "draft-model" not in setting.drafters:
        raise ConfigError("bild needs a draft model with the target's tokenizer; give draft=")
    made: Contender = _in("ours").BigLittle(llm, temperature=setting.temperature)
    return made


CONTENDERS: dict[str, ContenderKind] = {
    **{
        name: ContenderKind(DRAFTERS[drafter].summary, "foredraft", partial(_ours, drafter, name))
        for drafter in DRAFTERS
        for name in (PLAIN if drafter == "none" else drafter,)
    },
    "bild": ContenderKind(
        "Big Little Decoder: the draft stands unless it surprises the target (not lossless)",
        "foredraft",
        _big_little,
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


def suits(drafter: str, policy: str) -> bool:
    """Whether a policy can decide about a drafter: only one that weighs costs chooses among several, and only
    a stepper can tell how sure it is."""
    who, how = DRAFTERS[drafter], POLICIES[policy]
    return (how.weighs or not who.chooses) and (who.stepper or not how.confident)


def chosen(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The contenders of these names, plain always among them and first; None is all there are.

    Raises ConfigError that names one that is unknown, or whose program is not installed.
    """
    if names is None:
        return tuple(CONTENDERS)
    asked = ",".join(names)
    for name in names:
        if name not in CONTENDERS:
            raise ConfigError(
                f"methods is {asked!r}, but there is no {name!r}; give some of {', '.join(CONTENDERS)}"
            )
        missing = PROGRAMS[CONTENDERS[name].program].missing
        if missing is not None:
            raise ConfigError(f"methods is {asked!r}, but {missing}")
    return tuple(dict.fromkeys((PLAIN, *names)))
