"""Options of `verify`, `bench` and `tune`: those that the library declares, and those of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cyclopts import Group, Parameter, Token

from foredraft.bench.bench_settings import BenchSettings
from foredraft.bench.contenders import CONTENDERS
from foredraft.bench.workload import PromptForm
from foredraft.cli.options import CHAT, Flag, bullets
from foredraft.cli.sections import Given, measured, option, section
from foredraft.tune.tune_settings import TuneSettings
from foredraft.verify import VerifySettings
from foredraft.verify.verify_settings import ALL, DEFAULT, DEFECTS

WORKLOAD, PROMPTS, BATCH = "all", 8, "1"  # what `bench` takes by default


def parse_whole(_: type, words: Sequence[Token]) -> int:
    """Parse a whole number, and refuse a fraction instead of rounding it; `2.0` counts as whole."""
    word = words[0].value
    with suppress(ValueError):
        if "." not in word:
            return int(word)
        if float(word).is_integer():
            return int(float(word))
    raise ValueError(f"{word!r} is not a whole number")


DEFECT_HELP = bullets({name: defect.summary for name, defect in DEFECTS.items()})
CONTENDER_HELP = bullets({name: kind.summary for name, kind in CONTENDERS.items()})
HTML = {"html": option(Path, "Write a report with plots to this file, one self-contained page.")}
VERIFY = {
    "prompts": option(
        str,
        'File of prompts: one per line, or .jsonl with a "prompt" in every line. Default: the prompts that'
        " ship with Foredraft.",
    ),
    **measured(VerifySettings),
    "self_test": option(
        str,
        f"Plant a defect and check that the tests find it; the exit code is then 1. Without a name:"
        f" {DEFAULT}.\n\n{DEFECT_HELP}- {ALL}: each in turn",
    ),
    **HTML,
}
BENCH = {
    "methods": option(
        str,
        "Methods to time, separated by commas; plain is always timed.\n\n"
        f"{CONTENDER_HELP}\nDefault, or with all: every lossless method that can run.",
    ),
    "policies": option(
        str,
        "Also time the drafters under these policies, separated by commas, or under all; the report then has"
        " a table by policy. --policy-option applies to --policy only.",
    ),
    "workload": option(
        str,
        'Names or files, separated by commas. A file has a "prompt" in every line of JSON; all stands for the'
        f" workloads that ship with Foredraft. [default: {WORKLOAD}]",
    ),
    "prompts": option(
        int, f"Maximum number of prompts per workload, evenly spaced over it. [default: {PROMPTS}]"
    ),
    **measured(BenchSettings, "new_tokens", "repeats"),
    "batch": option(str, f"Batch sizes, separated by commas. [default: {BATCH}]"),
    **measured(BenchSettings, "temperature"),
    **HTML,
}
TUNE = {
    "prompts": option(
        str,
        'File of prompts: one per line, or .jsonl with a "prompt" in every line; a quarter of them is held'
        " out. Required with --model; the demo model's prompts ship with Foredraft.",
    ),
    **measured(TuneSettings, whole=parse_whole),
    "plan_out": option(
        Path,
        "Also write the plan to this file if it wins; generate, bench and verify find it in the cache"
        " folder.",
    ),
    **HTML,
}


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
        return PromptForm(self.chat, self.system)


if TYPE_CHECKING:
    VerifyOptions: TypeAlias = Given
    BenchOptions: TypeAlias = Given
    TuneOptions: TypeAlias = Given
else:
    VerifyOptions = section(
        "VerifyOptions", Group("Verifying", sort_key=3), VERIFY, ["prompts", "tokens", "detect", "html"]
    )
    BenchOptions = section(
        "BenchOptions",
        Group("Benchmark", sort_key=3),
        BENCH,
        ["methods", "workload", "prompts", "batch", "temperature", "html"],
    )
    TuneOptions = section(
        "TuneOptions",
        Group("Search", sort_key=2),
        TUNE,
        ["prompts", "trials", "timeout", "temperature", "html"],
    )
