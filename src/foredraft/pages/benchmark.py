"""The page of a benchmark, made of its records: the verdict first, and no speed without its exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from foredraft.bench.bench_records import BenchReport, Ceiling, ForwardCosts, Row, Spread
from foredraft.bench.contenders import PLAIN
from foredraft.pages.report_page import (
    DASH,
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

REMARK = (
    "Figures are medians over the counted prompts, with quartiles below them. A prompt's ratio is the"
    " median over its interleaved repeats. {counted}“Identical” and “all prompts” include every prompt."
    " “Identical” counts the prompts whose tokens equal plain decoding's in every run. Predicted speed-up:"
    " τ / (k c + v(k + 1)) at a prompt's own τ and draft length k, without host work. Ceiling: the same at"
    " the best draft length γ, if every drafted token were accepted with probability α."
)
COUNTED = "A prompt counts if plain decoding repeats less than {:.0%} of its 4-grams. "


def benchmark_page(report: BenchReport) -> str:
    """Return the whole HTML document."""
    limit = report.options.get("max_repeated")
    return ReportPage(
        title="Foredraft benchmark",
        verdicts=_verdicts(report),
        facts=_facts(report),
        tables=[
            table for batch in sorted({row.batch for row in report.rows}) for table in _tables(report, batch)
        ],
        remark=REMARK.format(counted="" if limit is None else COUNTED.format(limit)),
        plots=plots(report),
        notes=[*filter(None, (report.turns_remark, report.bandwidth_remark)), *report.notes],
        details={"Options": report.options, "Machine": report.machine},
        finished=report.finished,
    ).html()


def _verdicts(report: BenchReport) -> list[PageVerdict]:
    """Return the verdict on speed at the smallest batch size, doubts, exactness, and lossy methods."""
    batch = min((row.batch for row in report.rows), default=1)
    drafter = "lossless drafter" if report.lossy else "drafter"
    own = [row for row in report.methods if row.batch == batch and not row.peer and row.contender != PLAIN]
    gains: dict[str, list[float]] = {}  # method -> speed-ups, one per workload
    for row in own:
        if row.speedup is not None:
            gains.setdefault(row.contender, []).append(row.speedup.median)

    def gain(name: str, *peers: str) -> str:
        """Return the speed-up, as in "1.77 × plain decoding (median of 2 workloads, batch 1)"."""
        ratios = ", ".join([f"{median(gains[name]):.2f} × plain decoding", *peers])
        workloads = f"{len(gains[name])} workload{'s'[: len(gains[name]) > 1]}"
        return f"{ratios} (median of {workloads}, batch {batch})"

    lossless = [name for name in gains if name not in report.lossy]
    best = max(lossless, key=lambda name: median(gains[name]), default=None)
    if best is None:
        speed = PageVerdict("none", f"No {drafter} has figures on counted prompts.")
    elif median(gains[best]) <= 1:
        speed = PageVerdict("bad", f"No {drafter} pays here: the best, {best}, reaches {gain(best)}.")
    else:
        over_peers: dict[str, list[float]] = {}
        for row in own:
            for peer, ratio in (row.over_peers or {}).items() if row.contender == best else ():
                over_peers.setdefault(peer, []).append(ratio.median)
        peers = [f"{median(ratios):.2f} × {peer}" for peer, ratios in over_peers.items()]
        told = f"The fastest {drafter} is {best}: {gain(best, *peers)}."
        speed = PageVerdict("doubtful" if report.doubts else "good", told)
    verdicts = [speed, *(PageVerdict("doubtful", doubt) for doubt in report.doubts)]
    verdicts.append(_exactness_verdict(report, drafter))
    for name in report.lossy:
        reaches = f" It reaches {gain(name)}." if name in gains else ""
        told = f"{name} is lossy: its output does not have the model's own distribution.{reaches}"
        verdicts.append(PageVerdict("none", told))
    return verdicts


def _exactness_verdict(report: BenchReport, drafter: str) -> PageVerdict:
    """Say whether the tokens of Foredraft's lossless drafters equal plain decoding's."""
    own = [row for row in report.rows if not row.peer and row.lossless and row.contender != PLAIN]
    found = [(row, row.exactness) for row in own if row.exactness]
    compared = [(row, exactness) for row, exactness in found if exactness.comparable]
    if not found:
        return PageVerdict("none", f"No tokens were compared: no {drafter} took part.")
    if not compared:
        return PageVerdict(
            "none", "No tokens were compared: independent samples of one distribution may differ."
        )
    differ = [row for row, exactness in compared if not exactness.holds]
    if differ:
        where = ", ".join(f"{report.name(row)} on {row.workload} at batch {row.batch}" for row in differ)
        return PageVerdict("bad", f"Tokens differ from plain decoding's: {where}.")
    return PageVerdict(
        "good", f"All tokens are identical to plain decoding's, in every run of every {drafter}."
    )


def _facts(report: BenchReport) -> dict[str, str]:
    """Return the models, the memory bandwidth and the costs of a plain step in words, by label."""
    facts = {
        model.role: f"{model.name}, {model.parameters / 1e6:,.1f} M parameters, {model.dtype},"
        f" {model.step_bytes / 1e6:,.1f} MB per step"
        for model in report.models
    }
    if report.bandwidth is not None:
        facts["memory"] = f"{report.bandwidth.bytes_per_second / 1e9:.1f} GB/s ({report.bandwidth.method})"
    for costs in report.typical_costs:
        share = "" if costs.bandwidth_share is None else f", {costs.bandwidth_share:.0%} of that bandwidth"
        drafting = "".join(
            f"; a draft of {name} costs {cost.first:.2f} plain steps, plus {cost.further:.2f} for each"
            " further token"
            for name, cost in costs.drafting.items()
        )
        others = "" if costs.others is None else f"; other programs used {costs.others.median:.2f} CPUs"
        facts[f"plain step, batch {costs.batch}"] = (
            f"{costs.step_seconds * 1e3:.2f} ms at {costs.context} tokens of context{share}{drafting}{others}"
        )
    return facts


Columns = dict[str, Callable[[Row], Cell]]
POLICY_COLUMNS = (
    *("over plain", "identical", "predicted", "measured ÷ predicted", "α", "τ", "draft length", "ceiling"),
    *("tokens/s", "others, CPUs"),
)


def _tables(report: BenchReport, batch: int) -> list[Table]:
    """Return two tables of the methods, as one would be wider than a screen, and one of policies."""
    rows = [row for row in report.methods if row.batch == batch]
    lines = [(row.workload, row.contender, row) for row in rows]
    speeds = _table(f"Every method on every workload, batch {batch}", "method", _speed_columns(rows), lines)
    drafts = _table(f"Drafts and predictions, batch {batch}", "method", DRAFT_COLUMNS, lines)
    rows = [row for row in report.policies if row.batch == batch]
    lines = [(f"{row.contender} on {row.workload}", row.policy or DASH, row) for row in rows]
    columns = {name: COLUMNS[name] for name in POLICY_COLUMNS}
    policies = _table(f"Every drafter under every policy, batch {batch}", "policy", columns, lines)
    return [speeds, *([drafts] if drafts.columns else []), policies]


def _speed_columns(rows: Sequence[Row]) -> Columns:
    peers = list(dict.fromkeys(peer for row in rows for peer in row.over_peers or {}))
    return {
        "tokens/s": _figure("tokens_per_second", form=".1f"),
        "over plain": _figure("speedup"),
        "others, CPUs": _figure("others"),
        "identical": _identical,
        "counted prompts": lambda row: Cell(f"{row.counted} of {row.prompts}"),
        "log p of a token, nats": _figure("log_probability", form=".3f"),
        "repeated 4-grams": _figure("repeated", form=".0%"),
        **{f"over {peer}": _figure("over_peers", peer) for peer in peers},
        "over batch 1": _figure("over_single"),
        "over plain, all prompts": _figure("speedup_all"),
        "prefill, s": _figure("prefill_seconds", form=".3f"),
        "peak memory, MiB": lambda row: Cell(
            DASH if row.peak_memory is None else f"{row.peak_memory / 2**20:,.0f}"
        ),
    }


def _table(title: str, first: str, columns: Columns, lines: Sequence[tuple[str, str, Row]]) -> Table:
    """Return the table, without the columns that have no figures."""
    rows = [row for _, _, row in lines if row.note is None]
    filled = {name: cell for name, cell in columns.items() if any(cell(row).text != DASH for row in rows)}
    groups: dict[str, list[Line]] = {}
    for group, heading, row in lines:
        line = Line(heading, [cell(row) for cell in filled.values()], row.note)
        groups.setdefault(group, []).append(line)
    return Table(title, first, tuple(filled), groups)


def _identical(row: Row) -> Cell:
    """Say for how many prompts the tokens equal plain decoding's, and where the first difference is."""
    exact = row.exactness
    if row.contender == PLAIN:
        return Cell("the reference")
    if not row.lossless:
        return Cell("lossy")
    if exact is None:
        return Cell(DASH)
    if not exact.comparable:
        return Cell("not comparable")
    first = exact.first
    where = "" if first is None else f"first at prompt {first.prompt + 1}, token {first.position + 1}"
    kind = "" if row.peer else "good" if exact.holds else "bad"  # another program may round differently
    mark = {"good": "✓ ", "bad": "✗ "}.get(kind, "")
    return Cell(f"{mark}{exact.identical} of {exact.prompts}", where, kind)


def _figure(*path: str, form: str = ".2f", unit: float = 1) -> Callable[[Row], Cell]:
    """Return a column of figures, found by attributes: numbers, ceilings, or medians with their quartiles."""

    def cell(row: Row) -> Cell:
        found: Any = row
        for name in path:
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        match found:
            case None:
                return Cell(DASH)
            case Spread():
                quartiles = f"{found.lower:{form}}–{found.upper:{form}}" if found.count > 1 else ""
                return Cell(f"{found.median:{form}}", quartiles)
            case Ceiling():
                return Cell(f"{found.speedup:{form}}", f"γ = {found.draft_length}")
        return Cell(f"{found / unit:{form}}")

    return cell


DRAFT_COLUMNS: Columns = {
    "predicted": _figure("predicted"),
    "measured ÷ predicted": _figure("measured_over_predicted"),
    "host overhead o": _figure("overhead"),
    "α": _figure("drafting", "alpha"),
    "τ": _figure("drafting", "mean_accepted_length"),
    "draft length": _figure("drafting", "mean_draft_length"),
    "ceiling": _figure("ceiling"),
    "ceiling at α = 1": _figure("perfect"),
    "share of bandwidth": _figure("bandwidth_share", form=".0%"),
}
COLUMNS = _speed_columns([]) | DRAFT_COLUMNS  # without those of other programs


OVER_PLAIN = Axis("speed-up over plain decoding", low=0, grid=True)
HOW_TO_READ = "Medians and quartiles over the counted prompts; the dashed line is plain decoding."
PARTS = {"draft": "drafting", "verify": "verifying", "rest": "rest"}  # field of RoundTime -> label


def plots(report: BenchReport) -> list[Plot]:
    """Return all plots that the records have figures for."""
    batches = sorted({row.batch for row in report.rows})
    drawn = ((_speedups, batches), (_policies, batches), (_acceptance, batches[:1]))
    found = [draw(report, batch) for draw, several in drawn for batch in several]
    found += [_costs(report.typical_costs), *(_round_times(report, batch) for batch in batches)]
    return [plot for plot in (*found, _predictions(report)) if plot is not None]


def _speedups(report: BenchReport, batch: int) -> Plot | None:
    rows = [(row, row.speedup) for row in _compared(report, batch) if row.speedup is not None]
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
    contenders, points = _contenders(report), []
    for contender in _distinct([row for row, _, _ in rows], "contender"):
        x, y = zip(*[(x, y) for row, x, y in rows if row.contender == contender], strict=True)
        points.append(Points(contender, x, y, contenders.index(contender)))
    most = 1.05 * max((max(x, y) for _, x, y in rows), default=0.0)
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
