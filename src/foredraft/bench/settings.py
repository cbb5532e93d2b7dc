"""The options of `bench`, `tune` and `verify`, checked before a model is loaded; defects of a self-test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

from foredraft.arguments import check_fields, option
from foredraft.arguments.values import Choice, Name, Number, Whole
from foredraft.bench.contenders import resolve_methods, resolve_policies
from foredraft.decode.params import RuleName
from foredraft.errors import ConfigError, Option

SEVERAL = Whole("1 or more", least=1, most=math.inf)
TWO_OR_MORE = Whole("2 or more", least=2, most=math.inf)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The options of a benchmark.

    Args:
        new_tokens: New tokens per prompt; end-of-text tokens are ignored.
        repeats: Runs of every method on every prompt.
        temperature: Sampling temperature; 0 is greedy. Above 0, outputs are compared with plain decoding's
            only under `acceptance` coupled.
    """

    # names of contenders; "all", or None, stands for every lossless one that can run
    methods: tuple[str, ...] | None = None
    # policies under which the drafters run in addition to the loaded one; "all" stands for all
    policies: tuple[str, ...] = ()
    new_tokens: int = field(default=64, metadata=option(TWO_OR_MORE))
    repeats: int = field(default=3, metadata=option(SEVERAL))
    batch: tuple[int, ...] = (1,)  # batch sizes
    temperature: float = field(default=0.0, metadata=option(Number("0 or more")))
    acceptance: RuleName = "speculative"  # the acceptance rule of Foredraft's contenders; a lossless one

    def __post_init__(self) -> None:
        resolve_methods(self.methods)
        resolve_policies(self.policies)
        check_fields(self, ConfigError)
        if not self.batch or min(self.batch) < 1:
            sizes = ",".join(map(str, self.batch))
            raise ConfigError(option="batch", value=sizes, remedy="give sizes of 1 or more")


SamplerName = Literal["hill-climbing", "gp"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The options of `tune`.

    Args:
        trials: Number of plans to try, including those of earlier runs of the same search.
        timeout: Start no trial after this many seconds of trials. Preparation and final timing are not
            included.
        storage: Database of the trials: sqlite:///FILE, or the URL of a database on a server, which several
            machines may share. Default: a file in the cache folder.
        sampler: Proposes plans after the seed plans: hill climbing (flips one sub-layer of the best plan at a
            time), or a Gaussian process, which needs fewer trials and longer for each.
        temperature: Temperature of the calibration texts and of the target distribution; 0 is greedy.
        max_draft: Maximum draft length to consider, in tokens.
        tokens: Tokens of the calibration texts, which the model writes itself, that a trial is scored on.
        finalists: Number of best plans that are timed at the end, in real decoding of held-out prompts.
        new_tokens: New tokens per held-out prompt.
        repeats: Runs of every finalist and of plain decoding on every held-out prompt.
        seed: Random seed of the sampler.
        draft_weights: Search what drafter low-bit leaves out of its copy of the model in these weights,
            instead.
    """

    trials: int = field(default=200, metadata=option(SEVERAL))
    timeout: float | None = field(default=None, metadata=option(Number("seconds, more than 0", above=True)))
    storage: str | None = field(default=None, metadata=option(Name("the URL of a database")))
    sampler: SamplerName = field(default="hill-climbing", metadata=option(Choice(names=SAMPLERS)))
    temperature: float = field(default=0.0, metadata=option(Number("0 or more")))
    max_draft: int = field(default=8, metadata=option(SEVERAL))
    tokens: int = field(default=4096, metadata=option(SEVERAL))
    finalists: int = field(default=3, metadata=option(SEVERAL))
    new_tokens: int = field(default=64, metadata=option(TWO_OR_MORE))
    repeats: int = field(default=3, metadata=option(SEVERAL))
    seed: int = field(default=0, metadata=option(Whole("a whole number from 0 to 2**32 - 1", most=2**32 - 1)))
    draft_weights: str | None = field(default=None, metadata=option(Choice(names=("int4", "int8"))))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class Progress(Protocol):
    """A callback for progress: the stage's name, steps done, steps in total, and a note to show beside it."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    """Ignore the progress."""


def without_prefill(progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Leave out the reading of prompts: its bar would flicker, and slow timed runs down."""
    return lambda stage, done, total: None if stage == "prefill" else progress(stage, done, total)


class Steps:
    """Count the steps of one stage and report each; the stage starts when the counter is made."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.done = 0
        progress(stage, 0, total)

    def __call__(self, count: int = 1) -> None:
        self.done += count
        self.progress(self.stage, self.done, self.total)


Rule: TypeAlias = Literal["speculative", "block", "coupled"]
RULES: tuple[Rule, ...] = get_args(Rule)
DEFAULTS: tuple[Rule, ...] = ("speculative", "coupled")  # the rules of requests that name none


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling parameters of a check, as in `SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalised(self) -> bool:
        """Whether emitted tokens change the next distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def options(self) -> dict[str, Any]:
        """The parameters by name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the parameters that are on.

        Examples:
            >>> str(Setting(temperature=0.8, top_k=50, top_p=0.9))
            'T=0.8 k=50 p=0.9'
        """
        shown = [("T", self.temperature, None), ("k", self.top_k, 0), ("p", self.top_p, 1.0)]
        shown += [("min-p", self.min_p, 0.0)]
        parts = [f"{name}={value:g}" for name, value, off in shown if value != off]
        if self.penalised:
            penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            parts.append("penalties=" + "/".join(f"{value:g}" for value in penalties))
        return " ".join(parts)


# A repetition penalty below 1 and a negative presence penalty make tokens recur at once, within one draft,
# where penalties must follow the draft; penalties that prevent repeats would hardly show in a few tokens. The
# frequency penalty then ends the repeats, so that texts do not become loops.
_PENALTIES: dict[str, float] = {"repetition_penalty": 0.9, "presence_penalty": -2.0, "frequency_penalty": 0.5}
GREEDY = Setting(temperature=0.0)
GREEDY_PENALISED = Setting(temperature=0.0, **_PENALTIES)  # type: ignore[arg-type]  # top_k is no penalty
PENALISED = Setting(temperature=0.9, min_p=0.02, **_PENALTIES)  # type: ignore[arg-type]  # as above
SETTINGS = (Setting(), Setting(temperature=0.8, top_k=50, top_p=0.9), PENALISED)  # of the chi-square tests


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect that a self-test plants."""

    summary: str  # what is wrong, in a few words
    rule: Rule | None  # the acceptance rule that it breaks; None breaks both, at temperature 0 too
    penalised: bool = False  # it shows only where a setting has penalties

    def affects(self, rule: Rule | None, setting: Setting) -> bool:
        """Return whether a check of the drafter can show the defect."""
        return self.rule in (None, rule) and (setting.penalised or not self.penalised)


DEFECTS = {
    "residual": Defect("corrections drawn from p, not from the residual", "speculative"),
    "position": Defect("the residual taken with q of the position before", "speculative"),
    "coin": Defect("one coin shared by all positions of a draft", "speculative"),
    "round-noise": Defect("noise of the coupled rule keyed by the round", "coupled"),
    "penalties": Defect("penalties not applied along the draft", None, penalised=True),
}
DEFAULT_DEFECT = "residual"
DISTANCES = (0.03, 0.05, 0.1)
BETWEEN = Number("a total variation distance between 0 and 1", most=math.nextafter(1, 0), above=True)


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """Options of a verification.

    Args:
        tokens: Maximum number of new tokens of each text that is compared token for token.
        samples: Samples per full chi-square test. Default: as many as `detect` needs.
        detect: Total variation distance between the sampled and the target's distribution that each full test
            must detect. Default: 0.03, or 0.05 or 0.1 where so many samples would take more than three
            minutes here.
        seed: Random seed, for reproducible samples. Default: a fresh one, which the report shows.
    """

    tokens: int = field(default=32, metadata=option(SEVERAL))
    samples: int | None = field(default=None, metadata=option(SEVERAL))
    detect: float | None = field(default=None, metadata=option(BETWEEN))
    seed: int | None = field(
        default=None, metadata=option(Whole("a whole number from 0 to 2**53 - 1", most=2**53 - 1))
    )
    acceptance: Rule | None = None  # the acceptance rule to test; None tests those of requests that name none
    self_test: str | None = None  # name of a defect to plant, which the checks must find; None plants none

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.acceptance is not None and self.acceptance not in RULES:
            problem = "which is not lossless, so there is nothing to verify"
            remedy = f"give {' or '.join(RULES)}, or leave it out"
            raise ConfigError(problem, option="acceptance", value=self.acceptance, remedy=remedy)
        if (name := self.self_test) is None:
            return
        if name not in DEFECTS:
            problem = "which is no defect to plant"
            raise ConfigError(problem, option="self_test", value=name, remedy=f"give {', '.join(DEFECTS)}")
        defect = DEFECTS[name]
        if self.acceptance is not None and defect.rule not in (None, self.acceptance):
            fault = (f"but {defect.summary} breaks nothing under ", Option("acceptance", self.acceptance))
            raise ConfigError(fault, option="self_test", value=name, remedy="leave one out")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The acceptance rules to test, the one that is tested in full first."""
        only = self.acceptance or (DEFECTS[self.self_test].rule if self.self_test else None)
        return DEFAULTS if only is None else (only,)


def no_drafter() -> ConfigError:
    """Return the error of a verification without a drafter."""
    return ConfigError(
        "there is no drafter, so there is nothing to verify",
        remedy=("give ", Option("draft"), " or ", Option("drafter", "lookup")),
    )
