"""The records of a search as one HTML file that needs no network and no scripts.

Every figure on the page is a rounded figure of the records. The verdict comes first, and every speed-up
stands beside its exactness flag.

Raises:
    ConfigError: matplotlib is not installed; raised on import.
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
    """Return the whole HTML document."""
    return render(
        "foredraft.tune",
        title="Foredraft search",
        verdicts=[_verdict(report)],
        finished=report.finished,
        facts=_facts(report),
        columns=COLUMNS,
        table=[(finalist.skips, _cells(finalist)) for finalist in report.finalists],
        plots=plots(report),
        notes=(*report.doubts, *report.unwritten, *report.notes),
        details={
            "Options": plain(report.options),
            "Seconds": plain({stage: round(seconds, 1) for stage, seconds in report.seconds.items()}),
            "Machine": plain(report.machine),
        },
    )


def _verdict(report: Report) -> Verdict:
    if report.winner is None:
        if report.finalists:
            return Verdict("bad", f"No plan was kept. {report.objections}")
        return Verdict("none", "No plan was timed.")
    winner = report.finalists[report.winner]
    exactness = {
        True: "every token equals plain decoding's",
        None: "tokens were not compared, because samples of one distribution may differ",
    }
    return Verdict(
        "good",
        f"{winner.skips} runs at {winner.speedup.median:.2f} × plain decoding, the median of {winner.prompts}"
        f" held-out prompts, with drafts of {winner.draft} tokens; {exactness[winner.identical]}.",
    )


def _facts(report: Report) -> dict[str, str]:
    best, costs = report.best, report.costs
    seed = max((trial.predicted for trial in report.trials if trial.origin), default=None)
    best_seed = "" if seed is None else f"; the best seed plan: {seed:.2f}"
    attention = sum(costs.attention) / len(costs.attention)
    return {
        "model": f"{report.model}, {report.layers} layers, {report.options['dtype']}",
        "search": f"{len(report.trials)} trials, each on {report.tokens} tokens",
        "best prediction": f"{best.predicted:.2f} × plain decoding, drafts of {best.draft} tokens{best_seed}",
        "costs of a draft": f"{costs.start:.3f} of a plain step per draft; per draft step {costs.fixed:.3f},"
        f" plus {attention:.4f} per attention, {costs.mlp:.4f} per MLP, and {costs.together:.3f} more if all"
        f" sub-layers run; a plain step takes {costs.step_seconds * 1e3:.2f} ms",
        "study": f"{report.study}, in {report.storage}",
        "plan": ", ".join(report.plan_files) or "not written",
    }


def _cells(finalist: Finalist) -> list[Cell]:
    quartiles = f"{finalist.speedup.lower:.2f}–{finalist.speedup.upper:.2f}"
    exactness = {
        True: Cell("✓ same in every run", "", "good"),
        False: Cell("✗ differ", "", "bad"),
        None: Cell("not comparable"),
    }
    return [
        Cell(str(finalist.draft)),
        Cell(
            f"{finalist.speedup.median:.2f}",
            f"{quartiles}, {finalist.faster} of {finalist.prompts} faster",
        ),
        exactness[finalist.identical],
        Cell(f"{finalist.predicted:.2f}"),
        Cell(f"{finalist.c:.2f}"),
        Cell(f"{finalist.alpha:.2f}"),
        Cell(f"{finalist.tau:.2f}"),
        Cell(f"{finalist.predicted_tau:.2f}"),
        Cell(f"{finalist.trial_tau:.2f}"),
        Cell(f"{finalist.repeated.median:.0%}"),
    ]
