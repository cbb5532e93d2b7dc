"""A search's records -> one HTML file that needs no network and no scripts.

Contract: every figure on the page is one of the records', rounded. The verdict stands first, and no speed
stands without its exactness.

Raises ConfigError, when it is imported, where matplotlib is not installed.
"""

from __future__ import annotations

from foredraft.bench.page import Verdict, plain, render
from foredraft.bench.report import Cell
from foredraft.tune.plots import plots
from foredraft.tune.records import Finalist, Report

__all__ = ["page"]

COLUMNS = (
    *("draft", "over plain", "tokens", "predicted", "c", "α"),
    *("τ", "predicted τ", "trial's τ", "repeated"),
)


def page(report: Report) -> str:
    """The whole document."""
    return render(
        "foredraft.tune",
        title="Foredraft search",
        verdicts=[_verdict(report)],
        finished=report.finished,
        facts=_facts(report),
        columns=COLUMNS,
        table=[(one.skips, _cells(one)) for one in report.finalists],
        plots=plots(report),
        notes=(*report.unwritten, *report.notes),
        details={
            "Options": plain(report.options),
            "Seconds": plain({stage: round(taken, 1) for stage, taken in report.seconds.items()}),
            "Machine": plain(report.machine),
        },
    )


def _verdict(report: Report) -> Verdict:
    if report.winner is None:
        if report.finalists:
            return Verdict("bad", f"No plan was kept. {report.objections}")
        return Verdict("none", "No plan was timed.")
    won = report.finalists[report.winner]
    same = {
        True: "every token was plain decoding's",
        None: "draws of one law need not be the same ones, so no tokens were compared",
    }
    return Verdict(
        "good",
        f"{won.skips} runs at {won.speedup.median:.2f} × own plain decoding, the median of {won.prompts}"
        f" held-out prompts, with drafts of {won.draft}; {same[won.identical]}.",
    )


def _facts(report: Report) -> dict[str, str]:
    best, costs = report.best, report.costs
    first = max((trial.predicted for trial in report.trials if trial.origin), default=None)
    begun = "" if first is None else f"; the best of those begun with, {first:.2f}"
    attention = sum(costs.attention) / len(costs.attention)
    return {
        "model": f"{report.model}, {report.layers} layers, {report.options['dtype']}",
        "search": f"{len(report.trials)} trials, each on {report.tokens} tokens",
        "best prediction": f"{best.predicted:.2f} × plain decoding, drafts of {best.draft}{begun}",
        "costs of a draft": f"{costs.start:.3f} of a plain step; of each of its steps: {costs.fixed:.3f},"
        f" {attention:.4f} an attention, {costs.mlp:.4f} an MLP, {costs.together:.3f} all together beyond"
        f" their sum; a plain step takes {costs.step_seconds * 1e3:.2f} ms",
        "study": f"{report.study}, in {report.storage}",
        "plan": ", ".join(report.plan_files) or "none was written",
    }


def _cells(one: Finalist) -> list[Cell]:
    quartiles = f"{one.speedup.lower:.2f}–{one.speedup.upper:.2f}"
    same = {
        True: Cell("✓ same in every run", "", "good"),
        False: Cell("✗ differ", "", "bad"),
        None: Cell("not comparable"),
    }
    return [
        Cell(str(one.draft)),
        Cell(f"{one.speedup.median:.2f}", f"{quartiles}, {one.faster} of {one.prompts} faster"),
        same[one.identical],
        Cell(f"{one.predicted:.2f}"),
        Cell(f"{one.c:.2f}"),
        Cell(f"{one.alpha:.2f}"),
        Cell(f"{one.tau:.2f}"),
        Cell(f"{one.predicted_tau:.2f}"),
        Cell(f"{one.trial_tau:.2f}"),
        Cell(f"{one.repeated.median:.0%}"),
    ]
