"""Options of the commands that measure, `verify`, `bench` and `tune`, beside those of `options`.

Defaults come from the rooms that do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter, Token

from foredraft.bench.bench_settings import BenchSettings as BenchDefaults
from foredraft.bench.contenders import CONTENDERS
from foredraft.cli.options import CHAT, Flag, bullets, common
from foredraft.model.prompt_form import PromptForm
from foredraft.tune.tune_settings import SamplerName
from foredraft.tune.tune_settings import TuneSettings as TuneDefaults
from foredraft.verify import VerifySettings as VerifyDefaults
from foredraft.verify.defects import ALL, DEFAULT, DEFECTS

__all__ = ["BenchOptions", "PromptOptions", "TuneOptions", "VerifyOptions"]

VERIFYING = Group("Verifying", sort_key=3)
BENCHMARK = Group("Benchmark", sort_key=3)
SEARCH = Group("Search", sort_key=2)
BENCH, TUNE, VERIFY = BenchDefaults(), TuneDefaults(), VerifyDefaults()


def parse_whole(_: type, words: Sequence[Token]) -> int:
    """Parse a whole number, and refuse a fraction instead of rounding it; `2.0` counts as whole."""
    word = words[0].value
    with suppress(ValueError):
        if "." not in word:
            return int(word)
        if float(word).is_integer():
            return int(float(word))
    raise ValueError(f"{word!r} is not a whole number")


Whole = Annotated[int, Parameter(converter=parse_whole)]
DEFECT_HELP = bullets({name: defect.summary for name, defect in DEFECTS.items()})
CONTENDER_HELP = bullets({name: kind.summary for name, kind in CONTENDERS.items()})


@Parameter(name="*", group=CHAT)
@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How the prompts of a measurement become token ids."""

    chat: Flag = False
    """Send each prompt as a user message in the model's chat template, as generate --chat does."""
    system: str | None = None
    """With --chat: the system message."""

    @property
    def form(self) -> PromptForm:
        """The form of the prompts.

        Raises:
            ConfigError: There is a system message but no chat, or it is not valid text.
        """
        return PromptForm(self.chat, self.system)


@Parameter(name="*", group=VERIFYING)
@dataclass(frozen=True, slots=True)
class VerifyOptions:
    prompts: Annotated[str | None, common(VERIFYING)] = None
    """File of prompts: one per line, or .jsonl with a "prompt" in every line. Default: the prompts that ship
    with Foredraft."""
    tokens: Annotated[int, common(VERIFYING)] = VERIFY.tokens
    """Maximum number of new tokens of each text that is compared token for token."""
    samples: int | None = None
    """Samples per full chi-square test. Default: as many as --detect needs."""
    detect: Annotated[float | None, common(VERIFYING)] = VERIFY.detect
    """Total variation distance between the sampled and the target's distribution that each full test must
    detect. Default: 0.03, or 0.05 or 0.1 where so many samples would take more than three minutes here."""
    seed: int | None = None
    """Random seed, for reproducible samples. Default: a fresh one, which the report shows."""
    self_test: Annotated[
        str | None,
        Parameter(
            help="Plant a defect and check that the tests find it; the exit code is then 1. Without a name:"
            f" {DEFAULT}.\n\n{DEFECT_HELP}- {ALL}: each in turn",
        ),
    ] = None
    html: Annotated[Path | None, common(VERIFYING)] = None
    """Write a report with plots to this file, one self-contained page."""


@Parameter(name="*", group=BENCHMARK)
@dataclass(frozen=True, slots=True)
class BenchOptions:
    methods: Annotated[
        str | None,
        common(
            BENCHMARK,
            help="Methods to time, separated by commas; plain is always timed.\n\n"
            f"{CONTENDER_HELP}\nDefault, or with all: every lossless method that can run.",
        ),
    ] = None
    policies: str | None = None
    """Also time the drafters under these policies, separated by commas, or under all; the report then has a
    table by policy. --policy-option applies to --policy only."""
    workload: Annotated[str, common(BENCHMARK)] = "all"
    """Names or files, separated by commas. A file has a "prompt" in every line of JSON; all stands for the
    workloads that ship with Foredraft."""
    prompts: Annotated[int | None, common(BENCHMARK)] = 8
    """Maximum number of prompts per workload, evenly spaced over it."""
    new_tokens: int = BENCH.new_tokens
    """New tokens per prompt; end-of-text tokens are ignored."""
    repeats: int = BENCH.repeats
    """Runs of every method on every prompt."""
    batch: Annotated[str, common(BENCHMARK)] = ",".join(map(str, BENCH.batch))
    """Batch sizes, separated by commas."""
    temperature: Annotated[float, common(BENCHMARK)] = BENCH.temperature
    """Sampling temperature; 0 is greedy. Above 0, outputs are compared with plain decoding's only under
    --acceptance coupled."""
    html: Annotated[Path | None, common(BENCHMARK)] = None
    """Write a report with plots to this file, one self-contained page."""


@Parameter(name="*", group=SEARCH)
@dataclass(frozen=True, slots=True)
class TuneOptions:
    prompts: Annotated[str | None, common(SEARCH)] = None
    """File of prompts: one per line, or .jsonl with a "prompt" in every line; a quarter of them is held out.
    Required with --model; the demo model's prompts ship with Foredraft."""
    trials: Annotated[Whole, common(SEARCH)] = TUNE.trials
    """Number of plans to try, including those of earlier runs of the same search."""
    timeout: Annotated[float | None, common(SEARCH)] = None
    """Start no trial after this many seconds of trials. Preparation and final timing are not included."""
    storage: str | None = None
    """Database of the trials: sqlite:///FILE, or the URL of a database on a server, which several machines
    may share. Default: a file in the cache folder."""
    sampler: SamplerName = TUNE.sampler
    """Proposes plans after the seed plans: hill climbing (flips one sub-layer of the best plan at a time), or
    a Gaussian process, which needs fewer trials and longer for each."""
    temperature: Annotated[float, common(SEARCH)] = TUNE.temperature
    """Temperature of the calibration texts and of the target distribution; 0 is greedy."""
    max_draft: Whole = TUNE.max_draft
    """Maximum draft length to consider, in tokens."""
    tokens: Whole = TUNE.tokens
    """Tokens of the calibration texts, which the model writes itself, that a trial is scored on."""
    finalists: Whole = TUNE.finalists
    """Number of best plans that are timed at the end, in real decoding of held-out prompts."""
    new_tokens: Whole = TUNE.new_tokens
    """New tokens per held-out prompt."""
    repeats: Whole = TUNE.repeats
    """Runs of every finalist and of plain decoding on every held-out prompt."""
    seed: Whole = TUNE.seed
    """Random seed of the sampler."""
    draft_weights: Literal["int4", "int8"] | None = None
    """Search what drafter low-bit leaves out of its copy of the model in these weights, instead."""
    plan_out: Path | None = None
    """Also write the plan to this file if it wins; generate, bench and verify find it in the cache folder."""
    html: Annotated[Path | None, common(SEARCH)] = None
    """Write a report with plots to this file, one self-contained page."""
