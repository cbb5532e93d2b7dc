"""Plots of a benchmark's records. A plot without figures is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foredraft.bench.bench_records import BenchReport, ForwardCosts, Row, Spread
from foredraft.bench.contenders import PLAIN
from foredraft.pages.drawing import Axis, Bars, Panel, Points, ReferenceLine
from foredraft.pages.report_page import Plot, make_plot

OVER_PLAIN = Axis("speed-up over plain decoding", low=0, grid=True)
HOW_TO_READ = "Medians and quartiles over the counted prompts; the dashed line is plain decoding."
PARTS = {"draft": "drafting", "verify": "verifying", "rest": "rest"}  # field of RoundTime -> label


def plots(report: BenchReport) -> list[Plot]:
    """Return all plots that the records have figures for."""
    batches = sorted({row.batch for row in report.rows})
    found = [_speedups(report, batch) for batch in batches]
    found += [_policies(report, batch) for batch in batches]
    found += [_acceptance(report, batch) for batch in batches[:1]]
    found += [_costs(report.typical_costs)]
    found += [_round_times(report, batch) for batch in batches]
    found += [_predictions(report)]
    return [plot for plot in found if plot is not None]


def _speedups(report: BenchReport, batch: int) -> Plot | None:
    rows = [(row, row.speedup) for row in _compared(report, batch) if row.speedup is not None]
    if not rows:
        return None
    workloads, contenders = _distinct([row for row, _ in rows], "workload"), _contenders(report)
    shown = [name for name in contenders if name in _distinct([row for row, _ in rows], "contender")]
    series = {
        name: [(row.workload, spread) for row, spread in rows if row.contender == name] for name in shown
    }
    panel = _ratios(workloads, series, [contenders.index(name) for name in shown])
    return make_plot(
        f"speedup-{batch}",
        f"Speed-up by method and workload{_batch_suffix(report, batch)}",
        HOW_TO_READ + "".join(f" {name} is lossy." for name in shown if name in report.lossy),
        [f"{row.contender} on {row.workload} {spread.median:.2f}" for row, spread in rows],
        [panel],
        OVER_PLAIN,
    )


def _policies(report: BenchReport, batch: int) -> Plot | None:
    rows = [(row, row.speedup) for row in report.policies if row.batch == batch and row.speedup is not None]
    if not rows:
        return None
    drafters, workloads = (_distinct([row for row, _ in rows], name) for name in ("contender", "workload"))
    policies = _distinct([row for row, _ in rows], "policy")
    panels = []
    for drafter in drafters:
        own = [(row, spread) for row, spread in rows if row.contender == drafter]
        series = {
            name: [(row.policy or "", spread) for row, spread in own if row.workload == name]
            for name in workloads
        }
        panels.append(_ratios(policies, series, range(len(workloads)), drafter))
    return make_plot(
        f"policies-{batch}",
        f"Speed-up by policy{_batch_suffix(report, batch)}",
        f"{HOW_TO_READ} A drafter that cannot follow a policy has no points there.",
        [f"{row.contender} under {row.policy} on {row.workload} {spread.median:.2f}" for row, spread in rows],
        panels,
        OVER_PLAIN,
    )


def _acceptance(report: BenchReport, batch: int) -> Plot | None:
    rows = [(row, row.drafting.acceptance_by_position) for row in _compared(report, batch) if row.drafting]
    rows = [(row, shares) for row, shares in rows if shares]
    if not rows:
        return None
    drafters, workloads = (_distinct([row for row, _ in rows], name) for name in ("contender", "workload"))
    panels = []
    for drafter in drafters:
        lines = [
            Points(row.workload, range(1, len(shares) + 1), shares, workloads.index(row.workload), "line")
            for row, shares in rows
            if row.contender == drafter
        ]
        panels.append(Panel(100, lines, Axis("accepted", low=0, high=1.02, grid=True), drafter))
    return make_plot(
        "acceptance",
        f"Acceptance by position{_batch_suffix(report, batch)}",
        "Share of the drafts reaching a position whose token there was accepted.",
        [
            f"{row.contender} on {row.workload} {', '.join(f'{share:.2f}' for share in shares)}"
            for row, shares in rows
        ],
        panels,
        Axis("position in the draft", whole=True),
    )


def _costs(costs: Sequence[ForwardCosts]) -> Plot | None:
    if not costs:
        return None
    lines = [
        Points(
            f"batch {one.batch}, a step of {one.step_seconds * 1e3:.2f} ms",
            [cost.rows for cost in one.verifying],
            [cost.v for cost in one.verifying],
            number,
            "line",
            spreads=[_ends(cost.seconds, one.step_seconds) for cost in one.verifying],
        )
        for number, one in enumerate(costs)
    ]
    rows = sorted({cost.rows for one in costs for cost in one.verifying})
    return make_plot(
        "cost",
        "Cost of a verifying pass",
        "A bare forward over several tokens of a sequence, in plain steps: where the line is flat, verifying"
        " costs nothing.",
        [
            f"{cost.rows} token{'s'[: cost.rows > 1]} at batch {one.batch} {cost.v:.2f}"
            for one in costs
            for cost in one.verifying
        ],
        [Panel(150, lines, Axis("plain steps", low=0, grid=True))],
        Axis("tokens of each sequence in one forward", ticks={n: str(n) for n in rows}, log=True),
    )


def _round_times(report: BenchReport, batch: int) -> Plot | None:
    rows = [
        (row, {part: getattr(row.round_time, part) * 1e3 for part in PARTS})
        for row in report.methods
        if row.batch == batch and row.round_time is not None
    ]
    if not rows:
        return None
    ends, bars = [0.0] * len(rows), []
    for number, (part, label) in enumerate(PARTS.items()):
        starts, ends = ends, [end + times[part] for end, (_, times) in zip(ends, rows, strict=True)]
        boxes = [
            (start, end, place - 0.38, place + 0.38)
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        bars.append(Bars(label, boxes, number))
    names = [f"{row.workload}, {row.contender}" for row, _ in rows]
    return make_plot(
        f"rounds-{batch}",
        f"Parts of a round{_batch_suffix(report, batch)}",
        "A mean round: drafting, verifying, and the rest (distributions, acceptance, commit, decoding loop).",
        [
            f"{row.contender} on {row.workload} "
            + ", ".join(f"{PARTS[part]} {milliseconds:.2f} ms" for part, milliseconds in times.items())
            for row, times in rows
        ],
        [Panel(17.0 * len(rows) + 8, bars, _rows(names))],
        Axis("milliseconds", low=0, grid=True),
    )


def _predictions(report: BenchReport) -> Plot | None:
    rows = [
        (row, row.predicted.median, row.speedup.median)
        for row in report.methods
        if row.contender != PLAIN and row.predicted is not None and row.speedup is not None
    ]
    if not rows:
        return None
    contenders, points = _contenders(report), []
    for contender in _distinct([row for row, _, _ in rows], "contender"):
        x, y = zip(*[(x, y) for row, x, y in rows if row.contender == contender], strict=True)
        points.append(Points(contender, x, y, contenders.index(contender)))
    most = 1.05 * max(max(x, y) for _, x, y in rows)
    return make_plot(
        "predicted",
        "Predicted and measured speed-up",
        "Predicted from the run's own drafts and from bare forwards, without host work. The distance below"
        " the dashed line is lost to host work.",
        [
            f"{row.contender} on {row.workload} at batch {row.batch} predicted {x:.2f}, measured {y:.2f}"
            for row, x, y in rows
        ],
        [Panel(250, [*points, ReferenceLine()], Axis("measured speed-up", low=0, high=most, grid=True))],
        Axis("predicted speed-up", low=0, high=most, grid=True),
    )


def _ratios(
    groups: Sequence[str],
    series: dict[str, list[tuple[str, Spread]]],
    numbers: Sequence[int],
    title: str = "",
) -> Panel:
    """Return speed-ups along x, with a row for each group and a place and a style in it for each series."""
    marks = [
        Points(
            label,
            [spread.median for _, spread in points],
            [groups.index(group) + 0.8 * ((place + 0.5) / len(series) - 0.5) for group, _ in points],
            numbers[place],
            spreads=[_ends(spread) for _, spread in points],
            along="x",
        )
        for place, (label, points) in enumerate(series.items())
    ]
    height = len(groups) * (12.0 + 11.0 * len(series))
    return Panel(height, [*marks, ReferenceLine(x=1)], _rows(groups), title)


def _rows(labels: Sequence[str]) -> Axis:
    """Return the vertical axis of rows from top to bottom."""
    return Axis(low=len(labels) - 0.5, high=-0.5, ticks=dict(enumerate(labels)))


def _compared(report: BenchReport, batch: int) -> list[Row]:
    return [row for row in report.methods if row.batch == batch and row.contender != PLAIN]


def _distinct(rows: Iterable[Row], field: str) -> list[str]:
    """Return the distinct values of a field, in the order of their first rows."""
    return list(dict.fromkeys(getattr(row, field) for row in rows))


def _contenders(report: BenchReport) -> list[str]:
    """Return all contenders but plain decoding; their order fixes each one's style in all plots."""
    return _distinct((row for row in report.rows if row.contender != PLAIN), "contender")


def _batch_suffix(report: BenchReport, batch: int) -> str:
    return f", batch {batch}" if len({row.batch for row in report.rows}) > 1 else ""


def _ends(spread: Spread, unit: float = 1.0) -> tuple[float, float]:
    return spread.lower / unit, spread.upper / unit
