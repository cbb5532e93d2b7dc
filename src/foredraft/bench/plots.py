"""Plots of a benchmark's records, for the HTML report.

Contract: a plot without figures is left out. The same records give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.bench.charts import INK, PAPER, legend, look, panels, style, svg, whiskers
from foredraft.bench.records import PLAIN, Costs, Report, Row, Spread

__all__ = ["Plot", "plots"]

DASHED = {"color": INK, "linewidth": 1, "linestyle": "--"}
OVER_PLAIN = "speed-up over plain decoding"
HOW_TO_READ = "Medians and quartiles over the counted prompts; the dashed line is plain decoding."
LABEL_SHARE = 0.07  # of an axis: a label of two digits and the space beside it
PARTS = {"draft": "drafting", "verify": "verifying", "rest": "rest"}  # field of RoundTime -> label


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.

    Attributes:
        name: Unique on a page; also an HTML id.
        title: The title.
        note: How to read it.
        alt: Its figures in words.
        svg: The drawing.
    """

    name: str
    title: str
    note: str
    alt: str
    svg: str


def plots(report: Report) -> list[Plot]:
    """Return all plots that the records have figures for."""
    batches = sorted({row.batch for row in report.rows})
    with style():
        found = [_speedups(report, batch) for batch in batches]
        found += [_policies(report, batch) for batch in batches]
        found += [_acceptance(report, batch) for batch in batches[:1]]
        found += [_costs(report.typical_costs)]
        found += [_round_times(report, batch) for batch in batches]
        found += [_predictions(report)]
    return [plot for plot in found if plot is not None]


def _speedups(report: Report, batch: int) -> Plot | None:
    rows = [(row, row.speedup) for row in _compared(report, batch) if row.speedup is not None]
    if not rows:
        return None
    workloads, contenders = _distinct([row for row, _ in rows], "workload"), _contenders(report)
    shown = [name for name in contenders if name in _distinct([row for row, _ in rows], "contender")]
    figure, (axes,) = panels(1.2 + len(workloads) * (0.2 + 0.17 * len(shown)))
    series = {
        name: [(row.workload, spread) for row, spread in rows if row.contender == name] for name in shown
    }
    _ratios(axes, workloads, series, [contenders.index(name) for name in shown])
    axes.set_xlim(left=0)
    axes.set_xlabel(OVER_PLAIN)
    legend(figure, axes)
    return Plot(
        f"speedup-{batch}",
        f"Speed-up by method and workload{_batch_suffix(report, batch)}",
        HOW_TO_READ + "".join(f" {name} is lossy." for name in shown if name in report.lossy),
        _sentence(f"{row.contender} on {row.workload} {spread.median:.2f}" for row, spread in rows),
        svg(figure, f"speedup-{batch}"),
    )


def _policies(report: Report, batch: int) -> Plot | None:
    rows = [(row, row.speedup) for row in report.policies if row.batch == batch and row.speedup is not None]
    if not rows:
        return None
    drafters, workloads = (_distinct([row for row, _ in rows], field) for field in ("contender", "workload"))
    policies = _distinct([row for row, _ in rows], "policy")
    line = 0.12 + 0.12 * len(workloads)
    figure, axes = panels(0.8 + len(drafters) * (0.4 + line * len(policies)), len(drafters))
    for panel, drafter in zip(axes, drafters, strict=True):
        own = [(row, spread) for row, spread in rows if row.contender == drafter]
        series = {
            name: [(row.policy or "", spread) for row, spread in own if row.workload == name]
            for name in workloads
        }
        _ratios(panel, policies, series, range(len(workloads)))
        panel.set_title(drafter, loc="left", fontsize=11)
    axes[-1].set_xlim(left=0)  # once all panels are drawn, because they share the axis
    axes[-1].set_xlabel(OVER_PLAIN)
    legend(figure, *axes)
    return Plot(
        f"policies-{batch}",
        f"Speed-up by policy{_batch_suffix(report, batch)}",
        f"{HOW_TO_READ} A drafter that cannot follow a policy has no points there.",
        _sentence(
            f"{row.contender} under {row.policy} on {row.workload} {spread.median:.2f}"
            for row, spread in rows
        ),
        svg(figure, f"policies-{batch}"),
    )


def _acceptance(report: Report, batch: int) -> Plot | None:
    rows = [(row, row.drafting.acceptance_by_position) for row in _compared(report, batch) if row.drafting]
    rows = [(row, shares) for row, shares in rows if shares]
    if not rows:
        return None
    drafters, workloads = (_distinct([row for row, _ in rows], field) for field in ("contender", "workload"))
    figure, axes = panels(0.9 + 1.9 * len(drafters), len(drafters))
    for panel, drafter in zip(axes, drafters, strict=True):
        for row, shares in rows:
            if row.contender == drafter:
                number = workloads.index(row.workload)
                panel.plot(range(1, len(shares) + 1), shares, label=row.workload, **look(number))
        panel.set_title(drafter, loc="left", fontsize=11)
        panel.set_ylim(0, 1.02)
        panel.set_ylabel("accepted")
        panel.grid(axis="y")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("position in the draft")
    legend(figure, *axes)
    return Plot(
        "acceptance",
        f"Acceptance by position{_batch_suffix(report, batch)}",
        "Share of the drafts reaching a position whose token there was accepted.",
        _sentence(
            f"{row.contender} on {row.workload} {', '.join(f'{share:.2f}' for share in shares)}"
            for row, shares in rows
        ),
        svg(figure, "acceptance"),
    )


def _costs(costs: Sequence[Costs]) -> Plot | None:
    if not costs:
        return None
    figure, (axes,) = panels(3.2)
    for number, one in enumerate(costs):
        unit = one.step_seconds
        whiskers(
            axes,
            [cost.rows for cost in one.verifying],
            [cost.v for cost in one.verifying],
            [_divided(cost.seconds, unit) for cost in one.verifying],
            along="y",
            label=f"batch {one.batch}, a step of {unit * 1e3:.2f} ms",
            **look(number),
        )
    ticks = sorted({cost.rows for one in costs for cost in one.verifying})
    axes.set_xscale("log", base=2)
    labelled = _apart(ticks)
    axes.set_xticks(labelled, [str(tick) for tick in labelled])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of each sequence in one forward")
    axes.set_ylabel("plain steps")
    axes.grid(axis="y")
    legend(figure, axes)
    return Plot(
        "cost",
        "Cost of a verifying pass",
        "A bare forward over several tokens of a sequence, in plain steps: where the line is flat, verifying"
        " costs nothing.",
        _sentence(
            f"{cost.rows} token{'s'[: cost.rows > 1]} at batch {one.batch} {cost.v:.2f}"
            for one in costs
            for cost in one.verifying
        ),
        svg(figure, "cost"),
    )


def _round_times(report: Report, batch: int) -> Plot | None:
    rows = [
        (row, {part: getattr(row.round_time, part) * 1e3 for part in PARTS})
        for row in report.methods
        if row.batch == batch and row.round_time is not None
    ]
    if not rows:
        return None
    figure, (axes,) = panels(1.2 + 0.24 * len(rows))
    places, ends = range(len(rows)), [0.0] * len(rows)
    for number, (part, label) in enumerate(PARTS.items()):
        lengths = [times[part] for _, times in rows]
        colour = look(number)["color"]
        axes.barh(places, lengths, left=ends, height=0.75, color=colour, edgecolor=PAPER, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.set_yticks(places, [f"{row.workload}, {row.contender}" for row, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    legend(figure, axes)
    return Plot(
        f"rounds-{batch}",
        f"Parts of a round{_batch_suffix(report, batch)}",
        "A mean round: drafting, verifying, and the rest (distributions, acceptance, commit, decoding loop).",
        _sentence(
            f"{row.contender} on {row.workload} "
            + ", ".join(f"{PARTS[part]} {milliseconds:.2f} ms" for part, milliseconds in times.items())
            for row, times in rows
        ),
        svg(figure, f"rounds-{batch}"),
    )


def _predictions(report: Report) -> Plot | None:
    rows = [
        (row, row.predicted.median, row.speedup.median)
        for row in report.methods
        if row.contender != PLAIN and row.predicted is not None and row.speedup is not None
    ]
    if not rows:
        return None
    figure, (axes,) = panels(4.6)
    contenders = _contenders(report)
    for contender in _distinct([row for row, _, _ in rows], "contender"):
        x, y = zip(*[(x, y) for row, x, y in rows if row.contender == contender], strict=True)
        axes.plot(x, y, linestyle="none", label=contender, **look(contenders.index(contender)))
    most = 1.05 * max(max(x, y) for _, x, y in rows)
    axes.plot([0, most], [0, most], **DASHED)
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("measured speed-up")
    axes.grid()
    legend(figure, axes)
    return Plot(
        "predicted",
        "Predicted and measured speed-up",
        "Predicted from the run's own drafts and from bare forwards, without host work. The distance below"
        " the dashed line is lost to host work.",
        _sentence(
            f"{row.contender} on {row.workload} at batch {row.batch} predicted {x:.2f}, measured {y:.2f}"
            for row, x, y in rows
        ),
        svg(figure, "predicted"),
    )


def _ratios(
    axes: Any, groups: Sequence[str], series: dict[str, list[tuple[str, Spread]]], looks: Sequence[int]
) -> None:
    """Draw speed-ups along x, with a row for each group and a place and a style in it for each series.

    Args:
        axes: Where to draw.
        groups: Labels of the rows.
        series: Points, as (group, spread), by the label of the series.
        looks: Number of each series' style.
    """
    for place, (label, points) in enumerate(series.items()):
        shift = 0.8 * ((place + 0.5) / len(series) - 0.5)
        spreads = [spread for _, spread in points]
        whiskers(
            axes,
            [spread.median for spread in spreads],
            [groups.index(group) + shift for group, _ in points],
            spreads,
            along="x",
            linestyle="none",
            label=label,
            **look(looks[place]),
        )
    axes.axvline(1, **DASHED)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="x")


def _apart(ticks: Sequence[int]) -> list[int]:
    """Return ticks of a logarithmic axis whose labels do not touch, the largest one included."""
    kept = [*ticks[-1:]]
    for tick in reversed(ticks[:-1]):
        if math.log(kept[0] / tick) >= LABEL_SHARE * math.log(ticks[-1] / ticks[0]):
            kept.insert(0, tick)
    return kept


def _compared(report: Report, batch: int) -> list[Row]:
    return [row for row in report.methods if row.batch == batch and row.contender != PLAIN]


def _distinct(rows: Iterable[Row], field: str) -> list[str]:
    """Return the distinct values of a field, in the order of their first rows."""
    return list(dict.fromkeys(getattr(row, field) for row in rows))


def _contenders(report: Report) -> list[str]:
    """Return all contenders but plain decoding; their order fixes each one's style in all plots."""
    return _distinct((row for row in report.rows if row.contender != PLAIN), "contender")


def _batch_suffix(report: Report, batch: int) -> str:
    return f", batch {batch}" if len({row.batch for row in report.rows}) > 1 else ""


def _divided(spread: Spread, unit: float) -> Spread:
    return Spread(spread.median / unit, spread.lower / unit, spread.upper / unit, spread.count)


def _sentence(figures: Iterable[str]) -> str:
    return f"{'; '.join(figures)}."
