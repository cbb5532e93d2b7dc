"""The page of a benchmark, made of its records: the verdict first, and no speed without its exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from foredraft.bench.bench_records import BenchReport, Ceiling, Row, Spread
from foredraft.bench.contenders import PLAIN
from foredraft.pages.benchmark_plots import plots
from foredraft.pages.report_page import DASH, Cell, Line, PageVerdict, ReportPage, Table, plain, render

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
    return render(
        ReportPage(
            title="Foredraft benchmark",
            verdicts=[
                _speed_verdict(report),
                *(PageVerdict("doubtful", doubt) for doubt in report.doubts),
                _exactness_verdict(report),
                *_lossy_verdicts(report),
            ],
            facts=_facts(report),
            tables=[
                table
                for batch in sorted({row.batch for row in report.rows})
                for table in (*_methods_tables(report, batch), _policies_table(report, batch))
                if table.groups
            ],
            remark=REMARK.format(counted="" if limit is None else COUNTED.format(limit)),
            plots=plots(report),
            notes=[*filter(None, (report.turns_remark, report.bandwidth_remark)), *report.notes],
            details={"Options": plain(report.options), "Machine": plain(report.machine)},
            finished=report.finished,
        )
    )


def _speed_verdict(report: BenchReport) -> PageVerdict:
    """Name the lossless drafter with the largest median speed-up, at the smallest batch size."""
    rows = [row for row in _drafter_rows(report) if row.lossless]
    gains = _gains(rows)
    if not gains:
        return PageVerdict("none", f"No {_drafter(report)} has figures on counted prompts.")
    best = max(gains, key=lambda name: median(gains[name]))
    if median(gains[best]) <= 1:
        return PageVerdict(
            "bad", f"No {_drafter(report)} pays here: the best, {best}, reaches {_gain(report, gains[best])}."
        )
    over_peers: dict[str, list[float]] = {}
    for row in rows:
        for peer, ratio in (row.over_peers or {}).items() if row.contender == best else ():
            over_peers.setdefault(peer, []).append(ratio.median)
    peers = [f"{median(ratios):.2f} × {peer}" for peer, ratios in over_peers.items()]
    kind = "doubtful" if report.doubts else "good"
    return PageVerdict(
        kind, f"The fastest {_drafter(report)} is {best}: {_gain(report, gains[best], *peers)}."
    )


def _exactness_verdict(report: BenchReport) -> PageVerdict:
    """Say whether the tokens of Foredraft's lossless drafters equal plain decoding's."""
    rows = [row for row in report.rows if not row.peer and row.exactness and row.contender != PLAIN]
    lossless = [row for row in rows if row.lossless]
    compared = [row for row in lossless if row.exactness and row.exactness.comparable]
    differ = [row for row in compared if row.exactness and not row.exactness.holds]
    if not lossless:
        return PageVerdict("none", f"No tokens were compared: no {_drafter(report)} took part.")
    if not compared:
        return PageVerdict(
            "none", "No tokens were compared: independent samples of one distribution may differ."
        )
    if differ:
        where = ", ".join(f"{report.name(row)} on {row.workload} at batch {row.batch}" for row in differ)
        return PageVerdict("bad", f"Tokens differ from plain decoding's: {where}.")
    return PageVerdict(
        "good", f"All tokens are identical to plain decoding's, in every run of every {_drafter(report)}."
    )


def _lossy_verdicts(report: BenchReport) -> list[PageVerdict]:
    """Return a verdict for each method that is not lossless."""
    gains = _gains([row for row in _drafter_rows(report) if not row.lossless])
    verdicts = []
    for name in report.lossy:
        text = f"{name} is lossy: its output does not have the model's own distribution."
        if name in gains:
            text += f" It reaches {_gain(report, gains[name])}."
        verdicts.append(PageVerdict("none", text))
    return verdicts


def _drafter(report: BenchReport) -> str:
    return "lossless drafter" if report.lossy else "drafter"


def _drafter_rows(report: BenchReport) -> list[Row]:
    """Return the rows of Foredraft's contenders that draft, at the smallest batch size."""
    batch = _smallest_batch(report)
    return [row for row in report.methods if row.batch == batch and not row.peer and row.contender != PLAIN]


def _smallest_batch(report: BenchReport) -> int:
    return min((row.batch for row in report.rows), default=1)


def _gains(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return each contender's speed-ups, one per workload."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row.speedup is not None:
            gains.setdefault(row.contender, []).append(row.speedup.median)
    return gains


def _gain(report: BenchReport, gains: Sequence[float], *peers: str) -> str:
    """Return the median speed-up, as in "1.77 × plain decoding (median of 2 workloads, batch 1)"."""
    ratios = ", ".join([f"{median(gains):.2f} × plain decoding", *peers])
    workloads = f"{len(gains)} workload{'s'[: len(gains) > 1]}"
    return f"{ratios} (median of {workloads}, batch {_smallest_batch(report)})"


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


def _methods_tables(report: BenchReport, batch: int) -> list[Table]:
    """Return two tables of the methods: one of all figures would be wider than a screen."""
    rows = [row for row in report.methods if row.batch == batch]
    lines = [(row.workload, row.contender, row) for row in rows]
    speeds = _table(f"Every method on every workload, batch {batch}", "method", _speed_columns(rows), lines)
    drafts = _table(f"Drafts and predictions, batch {batch}", "method", _draft_columns(), lines)
    return [speeds, drafts] if drafts.columns else [speeds]


def _speed_columns(rows: Sequence[Row]) -> Columns:
    peers = list(dict.fromkeys(peer for row in rows for peer in row.over_peers or {}))
    return {
        "tokens/s": lambda row: _spread(row.tokens_per_second, ".1f"),
        "over plain": lambda row: _spread(row.speedup, ".2f"),
        "others, CPUs": lambda row: _spread(row.others, ".2f"),
        "identical": _identical,
        "counted prompts": lambda row: Cell(f"{row.counted} of {row.prompts}"),
        "log p of a token, nats": lambda row: _spread(row.log_probability, ".3f"),
        "repeated 4-grams": lambda row: _spread(row.repeated, ".0%"),
        **{f"over {peer}": _over(peer) for peer in peers},
        "over batch 1": lambda row: Cell(_number(row.over_single, ".2f")),
        "over plain, all prompts": lambda row: _spread(row.speedup_all, ".2f"),
        "prefill, s": lambda row: _spread(row.prefill_seconds, ".3f"),
        "peak memory, MiB": lambda row: Cell(_number(row.peak_memory and row.peak_memory / 2**20, ",.0f")),
    }


def _draft_columns() -> Columns:
    return {
        "predicted": lambda row: _spread(row.predicted, ".2f"),
        "measured ÷ predicted": lambda row: _spread(row.measured_over_predicted, ".2f"),
        "host overhead o": lambda row: _spread(row.overhead, ".2f"),
        "α": lambda row: _drafting(row, "alpha"),
        "τ": lambda row: _drafting(row, "mean_accepted_length"),
        "draft length": lambda row: _drafting(row, "mean_draft_length"),
        "ceiling": lambda row: _ceiling(row.ceiling),
        "ceiling at α = 1": lambda row: _ceiling(row.perfect),
        "share of bandwidth": lambda row: Cell(_number(row.bandwidth_share, ".0%")),
    }


def _policies_table(report: BenchReport, batch: int) -> Table:
    known = _speed_columns([]) | _draft_columns()
    columns = {name: known[name] for name in POLICY_COLUMNS}
    rows = [row for row in report.policies if row.batch == batch]
    lines = [(f"{row.contender} on {row.workload}", row.policy or DASH, row) for row in rows]
    return _table(f"Every drafter under every policy, batch {batch}", "policy", columns, lines)


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


def _over(peer: str) -> Callable[[Row], Cell]:
    return lambda row: _spread((row.over_peers or {}).get(peer), ".2f")


def _drafting(row: Row, field: str) -> Cell:
    return Cell(DASH if row.drafting is None else _number(getattr(row.drafting, field), ".2f"))


def _ceiling(ceiling: Ceiling | None) -> Cell:
    return Cell(DASH) if ceiling is None else Cell(f"{ceiling.speedup:.2f}", f"γ = {ceiling.draft_length}")


def _spread(spread: Spread | None, form: str) -> Cell:
    if spread is None:
        return Cell(DASH)
    quartiles = f"{spread.lower:{form}}–{spread.upper:{form}}" if spread.count > 1 else ""
    return Cell(f"{spread.median:{form}}", quartiles)


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else f"{value:{form}}"
