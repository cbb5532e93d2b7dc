"""The pages of a training and of a search of layers to skip; speed-ups stand beside their exactness flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from foredraft.drafters.plan_files import Skips
from foredraft.pages.report_page import (
    Axis,
    Bars,
    Cell,
    Line,
    PageVerdict,
    Panel,
    Plot,
    Points,
    ReferenceLine,
    ReportPage,
    Table,
    make_plot,
)
from foredraft.train.trainers import Result
from foredraft.tune.tune_records import Finalist, Trial, TuneReport

Entries = Sequence[Mapping[str, Any]]
TITLES = {
    "adapter": "an adapter",
    "eagle3": "an EAGLE-3 head",
    "mtp": "a layer that predicts further tokens",
    "dflash": "a DFlash head",
    "draft": "a draft model",
}
COLUMNS = {"predicted": "predicted speed-up", "alpha": "α", "tau": "τ", "agreement": "same argmax"}
REMARK = (
    "Figures on held-out documents. Predicted speed-up: τ / (γ c + 1) at the best draft length γ, with the"
    " cost c of a draft step by the bytes that it reads. `foredraft bench` measures it."
)


def training_page(what: str, result: Result, journal: Entries, options: Mapping[str, Any]) -> str:
    """Return the whole HTML document."""
    validations = [entry for entry in journal if "predicted" in entry]
    steps = [entry for entry in journal if "loss" in entry]
    end = "the validation got no better" if result.stopped_early else "all steps are done"
    table = Table("Validations", "step", [*COLUMNS.values(), "draft length"], {"": _lines(validations)})
    return ReportPage(
        title=f"Foredraft training of {TITLES[what]}",
        verdicts=[
            PageVerdict(
                "good" if result.predicted > 1 else "bad",
                f"The best one is predicted to run at {result.predicted:.2f} × plain decoding.",
            )
        ],
        facts={
            "written to": result.out,
            "training": f"{result.steps:,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s; {end}",
            "documents": f"{result.documents:,} to learn from, {result.held_out:,} held out,"
            f" {result.skipped:,} bad lines left out",
            "checkpoints and logs": result.work,
        },
        tables=[table],
        remark=REMARK,
        plots=[*_validation(validations), _learning(steps)],
        details={"Options": options},
    ).html()


def _lines(validations: Entries) -> list[Line]:
    best = max((entry["predicted"] for entry in validations), default=0.0)
    return [
        Line(
            f"{entry['step']:,}",
            [
                *(Cell(f"{entry[name]:.3f}", kind="good" if entry[name] == best else "") for name in COLUMNS),
                Cell(f"{entry['max_draft']:.0f}"),
            ],
        )
        for entry in validations
    ]


def _validation(validations: Entries) -> list[Plot | None]:
    if not validations:
        return []
    steps = [entry["step"] for entry in validations]
    predicted, alphas, taus = (
        Points("", steps, [entry[name] for entry in validations], number, "line")
        for number, name in enumerate(("predicted", "alpha", "tau"))
    )
    panels = [
        Panel(90, [predicted, ReferenceLine(y=1)], Axis(grid=True), "predicted speed-up"),
        Panel(60, [alphas], Axis(grid=True), "α"),
        Panel(60, [taus], Axis(grid=True), "τ"),
    ]
    told = [f"step {entry['step']} predicted {entry['predicted']:.2f}" for entry in validations]
    best = max(validations, key=lambda entry: entry["predicted"])
    lines = []
    for number, (label, entry) in enumerate((("first", validations[0]), ("best", best))):
        shares = entry["alpha_by_position"]
        lines.append(Points(f"{label} validation", range(1, len(shares) + 1), shares, number, "line"))
    return [
        make_plot(
            "validation", "Validation", "On held-out documents; the dashed line is plain decoding.", told,
            panels, Axis("step", whole=True),
        ),
        make_plot(
            "positions",
            "α by position of the draft",
            "Share of the drafts reaching a position whose token there would be accepted.",
            [f"position {at} {share:.2f}" for at, share in zip(lines[1].xs, lines[1].ys, strict=True)],
            [Panel(130, lines, Axis("accepted", low=0, high=1.02, grid=True))],
            Axis("position in the draft", whole=True),
        ),
    ]  # fmt: skip


def _learning(entries: Entries) -> Plot | None:
    if not entries:
        return None
    steps = [entry["step"] for entry in entries]
    names = {"loss": "loss", "overlap": "Σ min(p, q)", "learning_rate": "learning rate"}
    lines = [
        Points("", steps, [entry[name] for entry in entries], number, "line", marked=False)
        for number, name in enumerate(names)
    ]
    panels = [
        Panel(70, [line], Axis(grid=True), label) for line, label in zip(lines, names.values(), strict=True)
    ]
    first, last = entries[0], entries[-1]
    return make_plot(
        "learning",
        "Learning",
        "Every step's loss, the acceptance at temperature 1 that it has, and its learning rate.",
        f"The loss goes from {first['loss']:.3f} to {last['loss']:.3f} in {len(entries)} steps.",
        panels,
        Axis("step", whole=True),
    )


TRIAL_COLUMNS = (
    *("draft", "over plain", "tokens", "predicted", "c", "α"),
    *("τ", "predicted τ", "trial's τ", "repeated"),
)
TRIAL_REMARK = (
    "Held-out prompts, decoded in turns with plain decoding. Over plain: the median of the ratios within a"
    " prompt's repeats, then the median and the quartiles over the prompts. Predicted: the trial's speed-up,"
    " from the trial's τ on the calibration texts. Predicted τ: on the decoded texts, by teacher"
    " forcing from every position at which a draft could begin."
)
KINDS = {"attention": "attention", "mlp": "MLP"}


def tuning_page(report: TuneReport) -> str:
    """Return the whole HTML document."""
    lines = [Line(finalist.skips, _cells(finalist)) for finalist in report.finalists]
    table = Table("The best plans in real decoding", "plan", TRIAL_COLUMNS, {"": lines})
    return ReportPage(
        title="Foredraft search",
        verdicts=[_verdict(report)],
        facts=_facts(report),
        tables=[table],
        remark=TRIAL_REMARK,
        plots=[_history(report.trials), _layers(report), _importance(report)],
        notes=(*report.doubts, *report.unwritten, *report.notes),
        details={
            "Options": report.options,
            "Seconds": {stage: round(seconds, 1) for stage, seconds in report.seconds.items()},
            "Machine": report.machine,
        },
        finished=report.finished,
    ).html()


def _verdict(report: TuneReport) -> PageVerdict:
    if report.winner is None:
        if report.finalists:
            return PageVerdict("bad", f"No plan was kept. {report.objections}")
        return PageVerdict("none", "No plan was timed.")
    winner = report.finalists[report.winner]
    exactness = {
        True: "every token equals plain decoding's",
        None: "tokens were not compared, because samples of one distribution may differ",
    }
    return PageVerdict(
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
            f"{finalist.speedup.median:.2f}", f"{quartiles}, {finalist.faster} of {finalist.prompts} faster"
        ),
        exactness[finalist.identical],
        *(Cell(f"{figure:.2f}") for figure in finalist.figures),
        Cell(f"{finalist.repeated.median:.0%}"),
    ]


def _history(trials: Sequence[Trial]) -> Plot | None:
    groups = {"seed plans": True, "sampler": False}
    points = []
    for number, (label, seed) in enumerate(groups.items()):
        own = [trial for trial in trials if (trial.origin is not None) is seed]
        if own:
            numbers, predicted = zip(*((trial.number, trial.predicted) for trial in own), strict=True)
            points.append(Points(label, numbers, predicted, number))
    best = list(accumulate((trial.predicted for trial in trials), max))
    steps = Points("best so far", [trial.number for trial in trials], best, line="steps", marked=False)
    panel = Panel(165, [*points, steps, ReferenceLine(y=1)], Axis("predicted speed-up", grid=True))
    return make_plot(
        "history",
        "The search",
        "Predicted speed-up of every plan at its best draft length; the dashed line is plain decoding.",
        f"The best speed-up rises from {best[0]:.2f} to {best[-1]:.2f} in {len(trials)} trials.",
        [panel],
        Axis("trial", whole=True),
    )


def _layers(report: TuneReport) -> Plot | None:
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
    return make_plot(
        "layers",
        "Sub-layers run and skipped",
        "Filled squares are sub-layers that the draft runs; crosses are sub-layers that it skips. The plans"
        " are in the order of the table.",
        " ".join(f"{skips}." for skips in shown),
        panels,
        _of_layers(report),
    )


def _importance(report: TuneReport) -> Plot | None:
    panels = []
    for number, (kind, label) in enumerate(KINDS.items()):
        shares = [report.importance.get(f"{kind}.{layer}", 0.0) for layer in range(report.layers)]
        boxes = [(layer - 0.4, layer + 0.4, 0.0, share) for layer, share in enumerate(shares)]
        panels.append(Panel(80, [Bars("", boxes, number)], Axis("share", low=0, grid=True), label))
    most = sorted(report.importance.items(), key=lambda item: -item[1])[:5]
    return make_plot(
        "importance",
        "Importance of sub-layers",
        "How much running or skipping each sub-layer contributes to the difference between good and other"
        " trials (PED-ANOVA, arXiv:2304.10255). The plot above shows which sub-layers are skipped.",
        [f"{name} {share:.2f}" for name, share in most],
        panels,
        _of_layers(report),
    )


def _of_layers(report: TuneReport) -> Axis:
    return Axis("layer", low=-0.6, high=report.layers - 0.4, whole=True)
