"""Plots of a search, for the report. The same records give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from foredraft.bench.charts import INK, LINE, PAPER, legend, look, panels, style, svg
from foredraft.bench.plots import Plot
from foredraft.drafters.skips import Skips
from foredraft.tune.records import Report, Trial

__all__ = ["plots"]

KINDS = ("attention", "mlp")
LABELS = {"attention": "attention", "mlp": "MLP"}


def plots(report: Report) -> list[Plot]:
    """Return all plots for which the records have figures."""
    with style():
        found = [_history(report.trials), _layers(report), _importance(report)]
    return [plot for plot in found if plot is not None]


def _history(trials: Sequence[Trial]) -> Plot:
    figure, (axes,) = panels(3.4)
    groups = {"seed plans": True, "sampler": False}
    for number, (label, seed) in enumerate(groups.items()):
        own = [trial for trial in trials if (trial.origin is not None) is seed]
        if own:
            axes.plot(
                [trial.number for trial in own], [trial.predicted for trial in own], linestyle="none",
                label=label, **look(number),
            )  # fmt: skip
    best = list(accumulate((trial.predicted for trial in trials), max))
    axes.step([trial.number for trial in trials], best, where="post", color=INK, label="best so far")
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_xlabel("trial")
    axes.set_ylabel("predicted speed-up")
    axes.grid(axis="y")
    legend(figure, axes)
    return Plot(
        "history",
        "The search",
        "Predicted speed-up of every plan at its best draft length; the dashed line is plain decoding.",
        f"The best speed-up rises from {best[0]:.2f} to {best[-1]:.2f} in {len(trials)} trials.",
        svg(figure, "history"),
    )


def _layers(report: Report) -> Plot:
    """Draw one square per sub-layer of each finalist, or of the best trial if there is no finalist."""
    shown = [finalist.skips for finalist in report.finalists] or [report.best.skips]
    figure, panels_ = panels(0.6 + 0.75 * len(shown), len(shown))
    for axes, skips in zip(panels_, shown, strict=True):
        plan = Skips.parse(skips).plan(report.layers)
        for row, kind in enumerate(KINDS):
            for layer, runs in enumerate(getattr(plan, kind)):
                colour = look(row)["color"] if runs else PAPER
                axes.barh(row, 0.86, left=layer - 0.43, height=0.8, color=colour, edgecolor=LINE)
                if not runs:  # a cross, for readers who cannot tell the colours
                    axes.plot(layer, row, marker="x", markersize=4, color=INK, linestyle="none")
        axes.set_yticks(range(len(KINDS)), [LABELS[kind] for kind in KINDS])
        axes.set_ylim(len(KINDS) - 0.5, -0.5)
        axes.set_xlim(-0.6, report.layers - 0.4)
    panels_[-1].xaxis.get_major_locator().set_params(integer=True)
    panels_[-1].set_xlabel("layer")
    return Plot(
        "layers",
        "Sub-layers run and skipped",
        "Filled squares are sub-layers that the draft runs; crosses are sub-layers that it skips. The plans"
        " are in the order of the table.",
        " ".join(f"{skips}." for skips in shown),
        svg(figure, "layers"),
    )


def _importance(report: Report) -> Plot | None:
    if not report.importance:
        return None
    figure, panels_ = panels(3.6, len(KINDS))
    for number, (axes, kind) in enumerate(zip(panels_, KINDS, strict=True)):
        shares = [report.importance.get(f"{kind}.{layer}", 0.0) for layer in range(report.layers)]
        axes.bar(range(report.layers), shares, color=look(number)["color"], edgecolor=PAPER)
        axes.set_title(LABELS[kind], loc="left", fontsize=11)
        axes.set_ylabel("share")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    panels_[-1].xaxis.get_major_locator().set_params(integer=True)
    panels_[-1].set_xlabel("layer")
    most = sorted(report.importance.items(), key=lambda item: -item[1])[:5]
    return Plot(
        "importance",
        "Importance of sub-layers",
        "How much running or skipping each sub-layer contributes to the difference between good and other"
        " trials (PED-ANOVA, arXiv:2304.10255). The plot above shows which sub-layers are skipped.",
        "; ".join(f"{name} {share:.2f}" for name, share in most) + ".",
        svg(figure, "importance"),
    )
