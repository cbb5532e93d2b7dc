"""`foredraft tune`: search the sub-layers that a model leaves out while it drafts for itself.

stdout has a table, or with --json one JSON document. The exit code is 0, whether or not a plan won, and 1 if
a plan's tokens differ from plain decoding's. After Ctrl-C, the study keeps its trials, the document reports
them, and the code is 130. If the winning plan cannot be written, the document is still printed and the code
is 2.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.exit_codes import FAILED, INTERRUPTED
from foredraft.cli.interrupt import Raised
from foredraft.cli.layout import table
from foredraft.cli.measuring import PromptOptions, TuneOptions
from foredraft.cli.options import NONE, DocumentOptions, ModelOptions, load_options
from foredraft.cli.output_files import check_places, write_report
from foredraft.cli.progress import started
from foredraft.cli.prompts import read_prompts
from foredraft.errors import ConfigError
from foredraft.tune.tune_settings import TuneSettings

if TYPE_CHECKING:
    from foredraft.tune.tune_records import TuneReport

__all__ = ["tune"]


def tune(
    *,
    tuning: TuneOptions = TuneOptions(),
    model: ModelOptions = NONE,
    prompting: PromptOptions = PromptOptions(),
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Search the layers that this model can leave out while it drafts for itself, and keep the best plan.

    A trial needs no decoding: it is one forward of the draft over texts that the model wrote itself, and
    predicts the draft's speed-up. The best plans are then timed in real decoding of held-out prompts, in
    turns with plain decoding; the plan is kept only if it wins. An interrupted search continues where it
    stopped.
    """
    given, form, name = asdict(tuning), prompting.form, model.get("model")
    options = TuneSettings(**{own: given[own] for own in given if own not in ("prompts", "plan_out", "html")})
    refuse_empty(prompts=tuning.prompts, storage=tuning.storage, model=name)
    files = {"plan_out": tuning.plan_out, "out": output.out, "html": tuning.html}
    refuse_empty(**files)
    check_places(**files)
    prompts = prompts_of(tuning.prompts, name)
    bars = started()
    try:
        from foredraft.tune.run import tune as run

        with Raised():
            report = run(
                prompts,
                options,
                model=name,
                plan_out=tuning.plan_out,
                truncate=model.get("truncate"),
                form=form,
                progress=bars.show,
                **load_options(model),
            )
    finally:
        bars.clear()
    write_report(
        report.as_dict(), lambda width: lines(report, width), output,
        html=tuning.html, page=lambda: page(report),
    )  # fmt: skip
    if report.unwritten:
        raise ConfigError("; ".join(report.unwritten))
    if not report.finished:
        print("foredraft: interrupted; the same command goes on with the study", file=sys.stderr)
        return INTERRUPTED
    return (
        FAILED
        if model.get("deterministic", True) and any(one.identical is False for one in report.finalists)
        else 0
    )


def page(report: TuneReport) -> str:
    """Return the --html page."""
    from foredraft.pages.tuning import tuning_page

    return tuning_page(report)


def refuse_empty(**values: str | Path | None) -> None:
    """Refuse empty values, as an unset shell variable gives them.

    Args:
        **values: The value of each option, by the option's name. An empty file name reads as `Path()`.

    Raises:
        ConfigError: A value is empty.
    """
    for option, value in values.items():
        if value == "":
            raise ConfigError(option=option, value=value, remedy="give it a value, or leave it out")
        if value == Path():
            raise ConfigError("is '' or '.'", option=option, remedy="give a file in a folder that exists")


def prompts_of(file: str | None, model: str | None) -> list[str]:
    """Return the prompts to tune on: the file's, or for the demo model all that ship with Foredraft.

    Raises:
        ConfigError: The file has no prompts, or none is given for another model.
    """
    if file is not None:
        return read_prompts((), file, model)
    if model is not None:
        raise ConfigError(
            "is required with a model of your own",
            option="prompts",
            remedy="give a file with one prompt per line",
        )
    from foredraft import demo
    from foredraft.bench.workload import ALL, load_workloads

    return [*demo.prompts(), *(prompt for each in load_workloads((ALL,)) for prompt in each.prompts)]


# --- tables -----------------------------------------------------------------------------------------

COLUMNS = (
    *("plan", "draft", "over plain", "quartiles", "predicted"),
    *("c", "alpha", "tau", "predicted tau", "trial's tau", "identical"),
)


def lines(report: TuneReport, width: int | None = None) -> list[str]:
    """Return the report as a table, at most `width` characters wide, and sentences."""
    best, weights = report.best, report.options.get("draft_weights")
    copy = "" if weights is None else f" of its copy in {weights}"
    shown = [
        *(f"WARNING: {doubt}" for doubt in report.doubts),
        f"{report.model}: {len(report.trials)} trials of {2 * report.layers} sub-layers{copy} on"
        f" {report.tokens}"
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
        shown += [*table([COLUMNS, *rows], width, keys=2), ""]
    return [*shown, verdict(report), *report.notes]


def verdict(report: TuneReport) -> str:
    """Return one line on the outcome of the search."""
    if not report.finished:
        return "Interrupted before the best plans were timed to the end; nothing was written."
    if report.winner is None:
        return f"No plan won, and nothing was written. {report.objections}"
    won = report.finalists[report.winner]
    nowhere = "not written" if report.unwritten else "not kept, because the cache folder is turned off"
    written = f"written to {', '.join(report.plan_files)}" if report.plan_files else nowhere
    return (
        f"{won.skips} wins: {won.speedup.median:.2f} x plain decoding on {won.prompts} held-out prompts;"
        f" {written}."
    )
