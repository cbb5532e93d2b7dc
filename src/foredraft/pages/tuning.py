"""The page of a search of layers to skip, made of its records.

Every figure on the page is a rounded figure of the records, and every speed-up stands beside its exactness
flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from foredraft.drafters.skips import Skips
from foredraft.pages.drawing import Axis, Bars, Panel, Points, Rule, chart
from foredraft.pages.report_page import Cell, Line, Plot, ReportPage, Table, Verdict, plain, render, sentence
from foredraft.tune.tune_records import Finalist, Trial, TuneReport

__all__ = ["tuning_page"]

COLUMNS = (
    *("draft", "over plain", "tokens", "predicted", "c", "α"),
    *("τ", "predicted τ", "trial's τ", "repeated"),
)
REMARK = (
    "Held-out prompts, decoded in turns with plain decoding. Over plain: the median of the ratios within a"
    " prompt's repeats, then the median and the quartiles over the prompts. Predicted: the trial's speed-up,"
    " from the trial's τ on the calibration texts. Predicted τ: on the decoded texts, by teacher"
    " forcing from every position at which a draft could begin."
)
KINDS = {"attention": "attention", "mlp": "MLP"}


def tuning_page(report: TuneReport) -> str:
    """Return the whole HTML document."""
    lines = [Line(finalist.skips, _cells(finalist)) for finalist in report.finalists]
    table = Table("The best plans in real decoding", "plan", COLUMNS, {"": lines})
    return render(
        ReportPage(
            title="Foredraft search",
            verdicts=[_verdict(report)],
            facts=_facts(report),
            tables=[table] if lines else [],
            remark=REMARK if lines else "",
            plots=[_history(report.trials), _layers(report), *_importance(report)],
            notes=(*report.doubts, *report.unwritten, *report.notes),
            details={
                "Options": plain(report.options),
                "Seconds": plain({stage: round(seconds, 1) for stage, seconds in report.seconds.items()}),
                "Machine": plain(report.machine),
            },
            finished=report.finished,
        )
    )


def _verdict(report: TuneReport) -> Verdict:
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


def _facts(report: TuneReport) -> dict[str, str]:
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


# --- plots ------------------------------------------------------------------------------------------


def _history(trials: Sequence[Trial]) -> Plot:
    groups = {"seed plans": True, "sampler": False}
    points = []
    for number, (label, seed) in enumerate(groups.items()):
        own = [trial for trial in trials if (trial.origin is not None) is seed]
        if own:
            numbers, predicted = zip(*((trial.number, trial.predicted) for trial in own), strict=True)
            points.append(Points(label, numbers, predicted, number))
    best = list(accumulate((trial.predicted for trial in trials), max))
    steps = Points("best so far", [trial.number for trial in trials], best, line="steps", marked=False)
    panel = Panel(165, [*points, steps, Rule(y=1)], Axis("predicted speed-up", grid=True))
    return Plot(
        "history",
        "The search",
        "Predicted speed-up of every plan at its best draft length; the dashed line is plain decoding.",
        f"The best speed-up rises from {best[0]:.2f} to {best[-1]:.2f} in {len(trials)} trials.",
        chart("history", [panel], Axis("trial", whole=True)),
    )


def _layers(report: TuneReport) -> Plot:
    """Draw one square per sub-layer of each finalist, or of the best trial if there is no finalist."""
    shown = [finalist.skips for finalist in report.finalists] or [report.best.skips]
    rows = Axis(low=len(KINDS) - 0.5, high=-0.5, ticks=dict(enumerate(KINDS.values())))
    panels = []
    for skips in shown:
        plan = Skips.parse(skips).plan(report.layers)
        marks = []
        for row, kind in enumerate(KINDS):
            for skipped, number in ((False, row), (True, None)):
                boxes = [
                    (layer - 0.43, layer + 0.43, row - 0.4, row + 0.4)
                    for layer, runs in enumerate(getattr(plan, kind))
                    if runs is not skipped
                ]
                marks.append(Bars("", boxes, number))
        panels.append(Panel(36, marks, rows, skips))
    return Plot(
        "layers",
        "Sub-layers run and skipped",
        "Filled squares are sub-layers that the draft runs; crosses are sub-layers that it skips. The plans"
        " are in the order of the table.",
        " ".join(f"{skips}." for skips in shown),
        chart("layers", panels, _of_layers(report)),
    )


def _importance(report: TuneReport) -> list[Plot]:
    if not report.importance:
        return []
    panels = []
    for number, (kind, label) in enumerate(KINDS.items()):
        shares = [report.importance.get(f"{kind}.{layer}", 0.0) for layer in range(report.layers)]
        boxes = [(layer - 0.4, layer + 0.4, 0.0, share) for layer, share in enumerate(shares)]
        panels.append(Panel(80, [Bars("", boxes, number)], Axis("share", low=0, grid=True), label))
    most = sorted(report.importance.items(), key=lambda item: -item[1])[:5]
    plot = Plot(
        "importance",
        "Importance of sub-layers",
        "How much running or skipping each sub-layer contributes to the difference between good and other"
        " trials (PED-ANOVA, arXiv:2304.10255). The plot above shows which sub-layers are skipped.",
        sentence([f"{name} {share:.2f}" for name, share in most]),
        chart("importance", panels, _of_layers(report)),
    )
    return [plot]


def _of_layers(report: TuneReport) -> Axis:
    return Axis("layer", low=-0.6, high=report.layers - 0.4, whole=True)
