"""`foredraft tune`: what a model may leave out while it drafts for itself.

Contract: the last line of stdout is one JSON document, always; on a terminal the figures stand before it. The
exit code is 0, whether or not a plan won, and 1 when the tokens of one differ from plain decoding's. After
Ctrl-C the study keeps its trials, the document tells them, and the code is 130. A plan that won and could not
be written costs no document: then the code is 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.measuring import TuneOptions
from foredraft.cli.options import DraftingOptions, ModelOptions, loading
from foredraft.cli.output_files import check_places
from foredraft.cli.progress import ProgressBars, ProgressLines
from foredraft.cli.render import table
from foredraft.cli.verify import read_prompts
from foredraft.errors import ConfigError
from foredraft.files import write_whole
from foredraft.tune.options import Options

if TYPE_CHECKING:
    from foredraft.tune.records import Report

__all__ = ["tune"]

DIFFERS, INTERRUPTED = 1, 130


def tune(*, tuning: TuneOptions = TuneOptions(), model: ModelOptions = ModelOptions()) -> int:
    """Find the layers that this model may leave out while it drafts for itself; keep the plan if it wins.

    Trials need no decoding: each is one forward of a draft over texts that the model wrote itself, and
    predicts the draft's speed-up. The best few are timed in real decoding of held-out prompts, in turns with
    plain decoding. A search that was broken off goes on where it was.
    """
    asked = asdict(tuning)
    options = Options(**{name: asked[name] for name in asked if name not in ("prompts", "out", "html")})
    check_given(prompts=tuning.prompts, storage=tuning.storage, model=model.model)
    check_given(out=tuning.out, html=tuning.html)
    check_places(out=tuning.out, html=tuning.html)
    prompts = prompts_of(tuning.prompts, model.model)
    if tuning.html is not None:
        from foredraft.tune.report import page  # says now if it cannot draw
    from foredraft.tune.run import tune as run

    bars = ProgressBars() if sys.stderr.isatty() else ProgressLines()
    try:
        report = run(
            prompts,
            options,
            model=model.model,
            out=tuning.out,
            truncate=model.truncate,
            progress=bars.show,
            **loading(model, DraftingOptions()),
        )
    finally:
        bars.clear()
    try:
        if sys.stdout.isatty():
            print("\n".join([*lines(report), ""]))
        print(json.dumps(report.as_dict(), allow_nan=False), flush=True)
    finally:
        if tuning.html is not None:
            write_whole(tuning.html, page(report), "html")
    if report.unwritten:
        raise ConfigError("; ".join(report.unwritten))
    if not report.finished:
        print("foredraft: interrupted; the same command goes on with the study", file=sys.stderr)
        return INTERRUPTED
    return DIFFERS if model.deterministic and any(one.identical is False for one in report.finalists) else 0


def check_given(**values: str | Path | None) -> None:
    """By the option of each, refuse what is empty, as the value of a variable that is not set; a file of no
    name reads as the folder."""
    for option, value in values.items():
        if value == "":
            raise ConfigError(f"--{option} is ''; give it a value, or leave it out")
        if value == Path():
            raise ConfigError(f"--{option} is '' or '.'; give a file in a folder that there is")


def prompts_of(file: str | None, model: str | None) -> list[str]:
    """The file's; without one, for the demo model, all that ship."""
    if file is not None:
        return read_prompts((), file, model)
    if model is not None:
        raise ConfigError(
            "prompts is not given, and only you know what this model is used for; give a file, a prompt a"
            " line"
        )
    from foredraft import demo
    from foredraft.bench.workload import ALL, load_workloads

    return [*demo.prompts(), *(prompt for each in load_workloads((ALL,)) for prompt in each.prompts)]


# --- what a person sees -----------------------------------------------------------------------------


COLUMNS = (
    *("plan", "draft", "over plain", "quartiles", "predicted"),
    *("c", "alpha", "tau", "predicted tau", "trial's tau", "identical"),
)


def lines(report: Report) -> list[str]:
    """The report as a person reads it."""
    best = report.best
    shown = [
        f"{report.model}: {len(report.trials)} trials of {2 * report.layers} sub-layers on {report.tokens}"
        f" tokens; the best predicts {best.predicted:.2f} x plain decoding at drafts of {best.draft}",
        "",
    ]
    rows = [
        (
            one.skips,
            str(one.draft),
            f"{one.speedup.median:.2f}",
            f"{one.speedup.lower:.2f}-{one.speedup.upper:.2f}",
            f"{one.predicted:.2f}",
            f"{one.c:.2f}",
            f"{one.alpha:.2f}",
            f"{one.tau:.2f}",
            f"{one.predicted_tau:.2f}",
            f"{one.trial_tau:.2f}",
            {True: "yes", False: "NO", None: "not comparable"}[one.identical],
        )
        for one in report.finalists
    ]
    if rows:
        shown += [*table([COLUMNS, *rows]), ""]
    return [*shown, verdict(report), *report.notes]


def verdict(report: Report) -> str:
    if not report.finished:
        return "Interrupted before the best plans were timed to the end; nothing was written."
    if report.winner is None:
        return f"No plan won, and nothing was written. {report.objections}"
    won = report.finalists[report.winner]
    nowhere = "not written" if report.unwritten else "written nowhere, for nothing is kept"
    written = f"written to {', '.join(report.plan_files)}" if report.plan_files else nowhere
    return (
        f"{won.skips} wins: {won.speedup.median:.2f} x plain decoding on {won.prompts} held-out prompts;"
        f" {written}."
    )
