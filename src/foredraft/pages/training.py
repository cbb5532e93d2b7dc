"""The page of a training, made of its result and its journal: what was learned, and how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.pages.drawing import Axis, Panel, Points, Rule, chart
from foredraft.pages.report_page import Cell, Line, Plot, ReportPage, Table, Verdict, plain, render, sentence
from foredraft.train.result import Result

__all__ = ["training_page"]

Entries = Sequence[Mapping[str, Any]]
TITLES = {
    "adapter": "an adapter",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "draft": "a draft model",
}
COLUMNS = {"predicted": "predicted speed-up", "alpha": "α", "tau": "τ", "agreement": "same argmax"}
REMARK = (
    "Figures on held-out documents. Predicted speed-up: τ / (γ c + 1) at the best draft length γ, with the"
    " cost c of a draft step by the bytes that it reads. `foredraft bench` measures it."
)


def training_page(what: str, result: Result, journal: Entries, options: Mapping[str, Any]) -> str:
    """Return the whole HTML document.

    Args:
        what: A key of TITLES.
        result: The result.
        journal: The entries of the run's metrics.jsonl.
        options: The options of the training.
    """
    validations = [entry for entry in journal if "predicted" in entry]
    steps = [entry for entry in journal if "loss" in entry]
    end = "the validation got no better" if result.stopped_early else "all steps are done"
    table = Table("Validations", "step", [*COLUMNS.values(), "draft length"], {"": _lines(validations)})
    return render(
        ReportPage(
            title=f"Foredraft training of {TITLES[what]}",
            verdicts=[
                Verdict(
                    "good" if result.predicted > 1 else "bad",
                    f"The best one is predicted to run at {result.predicted:.2f} × plain decoding.",
                )
            ],
            facts={
                "written to": result.out,
                "training": f"{result.steps:,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s;"
                f" {end}",
                "documents": f"{result.documents:,} to learn from, {result.held_out:,} held out,"
                f" {result.skipped:,} bad lines left out",
                "checkpoints and logs": result.work,
            },
            tables=[table] if validations else [],
            remark=REMARK if validations else "",
            plots=[*_validation(validations), *_by_position(validations), *_learning(steps)],
            details={"Options": plain(options)},
        )
    )


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


def _validation(validations: Entries) -> list[Plot]:
    if not validations:
        return []
    steps = [entry["step"] for entry in validations]
    predicted, alphas, taus = (
        Points("", steps, [entry[name] for entry in validations], number, "line")
        for number, name in enumerate(("predicted", "alpha", "tau"))
    )
    panels = [
        Panel(90, [predicted, Rule(y=1)], Axis(grid=True), "predicted speed-up"),
        Panel(60, [alphas], Axis(grid=True), "α"),
        Panel(60, [taus], Axis(grid=True), "τ"),
    ]
    plot = Plot(
        "validation",
        "Validation",
        "On held-out documents; the dashed line is plain decoding.",
        sentence([f"step {entry['step']} predicted {entry['predicted']:.2f}" for entry in validations]),
        chart("validation", panels, Axis("step", whole=True)),
    )
    return [plot]


def _by_position(validations: Entries) -> list[Plot]:
    if not validations:
        return []
    best = max(validations, key=lambda entry: entry["predicted"])
    shown = {"first validation": validations[0], "best validation": best}
    lines = []
    for number, (label, entry) in enumerate(shown.items()):
        shares = entry["alpha_by_position"]
        lines.append(Points(label, range(1, len(shares) + 1), shares, number, "line"))
    last = lines[-1]
    plot = Plot(
        "positions",
        "α by position of the draft",
        "Share of the drafts reaching a position whose token there would be accepted.",
        sentence([f"position {at} {share:.2f}" for at, share in zip(last.xs, last.ys, strict=True)]),
        chart(
            "positions",
            [Panel(130, lines, Axis("accepted", low=0, high=1.02, grid=True))],
            Axis("position in the draft", whole=True),
        ),
    )
    return [plot]


def _learning(entries: Entries) -> list[Plot]:
    if not entries:
        return []
    steps = [entry["step"] for entry in entries]
    names = {"loss": "loss", "overlap": "Σ min(p, q)", "learning_rate": "learning rate"}
    panels = [
        Panel(
            70,
            [Points("", steps, [entry[name] for entry in entries], number, "line", marked=False)],
            Axis(grid=True),
            label,
        )
        for number, (name, label) in enumerate(names.items())
    ]
    first, last = entries[0], entries[-1]
    plot = Plot(
        "learning",
        "Learning",
        "Every step's loss, the acceptance at temperature 1 that it has, and its learning rate.",
        f"The loss goes from {first['loss']:.3f} to {last['loss']:.3f} in {len(entries)} steps.",
        chart("learning", panels, Axis("step", whole=True)),
    )
    return [plot]
