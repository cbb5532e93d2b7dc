"""The options of the commands that measure, `verify`, `bench` and `tune`, beside those of what they measure.

Contract: as in `options`; defaults are those of the rooms that do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter, Token

from foredraft.bench.contenders import CONTENDERS
from foredraft.bench.options import Options as BenchDefaults
from foredraft.cli.options import Flag
from foredraft.tune.options import Options as TuneDefaults
from foredraft.tune.options import SamplerName
from foredraft.verify import Options as VerifyDefaults

__all__ = ["BenchOptions", "TuneOptions", "VerifyOptions"]

VERIFYING = Group("Verifying", sort_key=3)
BENCHMARK = Group("Benchmark", sort_key=3)
SEARCH = Group("Search", sort_key=2)
BENCH, TUNE, VERIFY = BenchDefaults(), TuneDefaults(), VerifyDefaults()


def whole(_: type, words: Sequence[Token]) -> int:
    """A number that is none in full is refused, not rounded."""
    word = words[0].value
    with suppress(ValueError):
        if "." not in word:
            return int(word)
        if float(word).is_integer():
            return int(float(word))
    raise ValueError(f"{word!r} is no whole number")


Whole = Annotated[int, Parameter(converter=whole)]
CONTENDER_HELP = "; ".join(f"{name}: {kind.summary}" for name, kind in CONTENDERS.items())


@Parameter(name="*", group=VERIFYING)
@dataclass(frozen=True, slots=True)
class VerifyOptions:
    prompts: str | None = None
    """A file of prompts: one a line, or .jsonl with a "prompt" in every line. Without prompts, the demo's."""
    tokens: int = VERIFY.tokens
    """Tokens of each prompt at temperature 0, at most."""
    samples: int | None = None
    """Samples of each test of the sampled law; without it, as many as --detect needs."""
    detect: float = VERIFY.detect
    """The total variation between the sampled law and the target's that must not be missed."""
    seed: int | None = None
    """For samples that can be had again; without it a fresh one, which is reported."""
    self_test: Flag = False
    """Plant a defect, the correction drawn without the residual, to see it found: then the exit code is 1."""
    json: Flag = False
    """Print one JSON document instead of a table."""


@Parameter(name="*", group=BENCHMARK)
@dataclass(frozen=True, slots=True)
class BenchOptions:
    methods: Annotated[
        str | None,
        Parameter(
            help=f"Who takes part, with commas between; plain always does. {CONTENDER_HELP}. Without it,"
            " or with all, every lossless one that is possible."
        ),
    ] = None
    policies: str | None = None
    """The drafters take part under these policies, too, with commas between, or under all: for a table by
    policy. Numbers of --policy-option are for the one of --policy alone."""
    workload: str = "all"
    """Names or files, with commas between: a file holds a "prompt" in every line of JSON; all are those that
    ship with Foredraft."""
    prompts: int | None = 8
    """So many of each workload at most, evenly spread over it."""
    new_tokens: int = BENCH.new_tokens
    """Tokens of every prompt; nothing ends a text early."""
    repeats: int = BENCH.repeats
    """Runs of everybody on every prompt."""
    batch: str = ",".join(map(str, BENCH.batch))
    """Prompts that are decoded side by side; several sizes with commas between."""
    temperature: float = BENCH.temperature
    """0 is greedy. Above it, outputs are compared with plain decoding's with --acceptance coupled only."""
    json: Path | None = None
    """Write the last line of the output, one JSON document, here too."""
    html: Path | None = None
    """Write a report with plots here, one self-contained page."""


@Parameter(name="*", group=SEARCH)
@dataclass(frozen=True, slots=True)
class TuneOptions:
    prompts: str | None = None
    """A file of prompts: one a line, or .jsonl with a "prompt" in every line; a quarter is held out. Without
    it, for the demo model alone, those that ship with Foredraft."""
    trials: Whole = TUNE.trials
    """Plans to try, those of earlier runs of the same search included."""
    timeout: float | None = None
    """Begin no trial after so many seconds of trials; what comes before and after them takes its own time."""
    storage: str | None = None
    """Where trials are kept: the URL of a database, sqlite:///FILE or postgresql://USER@HOST/NAME (or of
    MySQL), which several machines may share. Without it, a file in the cache folder."""
    sampler: SamplerName = TUNE.sampler
    """Who proposes plans after those that a search begins with: flips of the best one's switches, a Gaussian
    process, TPE, or chance."""
    temperature: float = TUNE.temperature
    """Of the texts, and of the law that drafts are held against; 0 is greedy."""
    max_draft: Whole = TUNE.max_draft
    """Longest draft that is considered, in tokens."""
    tokens: Whole = TUNE.tokens
    """New tokens of the model's own that a trial is held against."""
    finalists: Whole = TUNE.finalists
    """Plans that are timed in real decoding of held-out prompts, in the end."""
    new_tokens: Whole = TUNE.new_tokens
    """Tokens of each held-out prompt."""
    repeats: Whole = TUNE.repeats
    """Runs of everybody on every held-out prompt."""
    seed: Whole = TUNE.seed
    """Of the sampler."""
    out: Path | None = None
    """Write the plan here too, if it wins; generate, bench and verify find it in the cache folder."""
    html: Path | None = None
    """Write a report with plots here, one self-contained page."""
