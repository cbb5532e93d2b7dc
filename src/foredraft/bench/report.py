"""A benchmark's records -> one HTML file that needs no network and no scripts.

Contract: every figure on the page is one of the records', rounded. The verdict stands first, and no speed
stands without its exactness. What the records do not have is a dash.

Raises ConfigError, when it is imported, where matplotlib is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from foredraft.bench.page import DASH, Verdict, plain, render
from foredraft.bench.plots import plots
from foredraft.bench.records import PLAIN, Ceiling, Report, Row, Spread

__all__ = ["page"]


def page(report: Report) -> str:
    """The whole document."""
    return render(
        "foredraft.bench",
        title="Foredraft benchmark",
        verdicts=[_speed(report), _exactness(report), *_lossy(report)],
        finished=report.finished,
        facts=_facts(report),
        tables=[
            table
            for batch in sorted({row.batch for row in report.rows})
            for table in (_by_method(report, batch), _by_policy(report, batch))
            if table.groups
        ],
        plots=plots(report),
        limit=report.options.get("max_repeated"),
        notes=report.notes,
        details={"Options": plain(report.options), "Machine": plain(report.machine)},
    )


def _speed(report: Report) -> Verdict:
    """Of the lossless drafter that gains most in the median workload, at the smallest batch."""
    ours = [row for row in _drafted(report) if row.lossless]
    drafter = _drafter(report)
    gains = _gains(ours)
    if not gains:
        return Verdict("none", f"No {drafter} has a figure that counts.")
    best = max(gains, key=lambda name: median(gains[name]))
    over = _over_plain(report, gains[best])
    if median(gains[best]) <= 1:
        return Verdict("bad", f"No {drafter} pays here: the best, {best}, reaches {', '.join(over)}.")
    peers: dict[str, list[float]] = {}
    for row in ours:
        for peer, ratio in (row.over_peers or {}).items() if row.contender == best else ():
            peers.setdefault(peer, []).append(ratio.median)
    also = [f"{median(ratios):.2f} × {peer}" for peer, ratios in peers.items()]
    said = ", ".join([over[0], *also, over[1]])
    return Verdict("good", f"The {drafter} that gains most is {best}: {said}.")


def _lossy(report: Report) -> list[Verdict]:
    """Of each drafter that is not lossless, apart from those that are."""
    gains = _gains([row for row in _drafted(report) if not row.lossless])
    return [
        Verdict(
            "none",
            f"{name} is lossy: its text is not the model's own."
            + (f" It reaches {', '.join(_over_plain(report, gains[name]))}." if name in gains else ""),
        )
        for name in report.lossy
    ]


def _drafter(report: Report) -> str:
    """What to call those that count."""
    return "lossless drafter" if report.lossy else "drafter"


def _drafted(report: Report) -> list[Row]:
    """By ours that draft, at the smallest batch."""
    batch = _smallest(report)
    return [row for row in report.methods if row.batch == batch and not row.peer and row.contender != PLAIN]


def _smallest(report: Report) -> int:
    return min((row.batch for row in report.rows), default=1)


def _gains(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Of each contender, by workload."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        if row.speedup is not None:
            gains.setdefault(row.contender, []).append(row.speedup.median)
    return gains


def _over_plain(report: Report, gains: Sequence[float]) -> tuple[str, str]:
    """The gain, and what it is the median of."""
    return (
        f"{median(gains):.2f} × own plain decoding",
        f"the median of {len(gains)} workload{'s'[: len(gains) > 1]} at batch {_smallest(report)}",
    )


def _exactness(report: Report) -> Verdict:
    ours = [row for row in report.rows if not row.peer and row.exactness and row.contender != PLAIN]
    lossless = [row for row in ours if row.lossless]
    compared = [row for row in lossless if row.exactness and row.exactness.comparable]
    differ = [row for row in compared if row.exactness and not row.exactness.holds]
    if not lossless:
        return Verdict("none", f"No tokens were compared: no {_drafter(report)} took part.")
    if not compared:
        return Verdict("none", "No tokens were compared: draws of one law need not be the same ones.")
    if differ:
        where = ", ".join(f"{report.name(row)} on {row.workload} at batch {row.batch}" for row in differ)
        return Verdict("bad", f"Tokens differ from plain decoding's: {where}.")
    return Verdict("good", f"Every token was plain decoding's, in every run of every {_drafter(report)}.")


def _facts(report: Report) -> dict[str, str]:
    facts = {
        model.role: f"{model.name}, {model.parameters / 1e6:,.1f} M parameters, {model.dtype},"
        f" {model.step_bytes / 1e6:,.1f} MB a step"
        for model in report.models
    }
    if report.bandwidth is not None:
        facts["memory"] = f"{report.bandwidth.bytes_per_second / 1e9:.1f} GB/s ({report.bandwidth.method})"
    for costs in report.typical_costs:
        share = "" if costs.bandwidth_share is None else f", {costs.bandwidth_share:.0%} of that bandwidth"
        drafting = "".join(
            f"; a draft of {name} costs {cost.first:.2f}, and {cost.further:.2f} a token after its first"
            for name, cost in costs.drafting.items()
        )
        facts[f"plain step, batch {costs.batch}"] = (
            f"{costs.step_seconds * 1e3:.2f} ms at {costs.context} tokens of context{share}{drafting}"
        )
    return facts


# --- the tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """more: what stands small beside it; kind: as of a verdict."""

    text: str
    more: str = ""
    kind: str = ""


Columns = dict[str, Callable[[Row], Cell]]


@dataclass(frozen=True, slots=True)
class Table:
    """first: what the lines' headings are. groups: by heading, a line of cells for each row: its own heading,
    and a cell a column or the row's note."""

    title: str
    first: str
    columns: tuple[str, ...]
    groups: dict[str, list[tuple[str, Row, list[Cell]]]]


def _by_method(report: Report, batch: int) -> Table:
    rows = [row for row in report.methods if row.batch == batch]
    peers = list(dict.fromkeys(peer for row in rows for peer in row.over_peers or {}))
    columns: Columns = {
        "tokens/s": lambda row: _spread(row.tokens_per_second, ".1f"),
        "over plain": lambda row: _spread(row.speedup, ".2f"),
        "tokens": _same,
        "counted prompts": lambda row: Cell(f"{row.counted} of {row.prompts}"),
        "repeated": lambda row: _spread(row.repeated, ".0%"),
        **{f"over {peer}": _over(peer) for peer in peers},
        "over batch 1": lambda row: Cell(_number(row.over_single, ".2f")),
        "over plain, all prompts": lambda row: _spread(row.speedup_all, ".2f"),
        "predicted": lambda row: _spread(row.predicted, ".2f"),
        "measured ÷ predicted": lambda row: _spread(row.measured_over_predicted, ".2f"),
        "overhead o": lambda row: _spread(row.overhead, ".2f"),
        "α": lambda row: _drafts(row, "alpha"),
        "τ": lambda row: _drafts(row, "mean_accepted_length"),
        "draft length": lambda row: _drafts(row, "mean_draft_length"),
        "ceiling": lambda row: _ceiling(row.ceiling),
        "ceiling at α = 1": lambda row: _ceiling(row.perfect),
        "prompt read in, s": lambda row: _spread(row.prefill_seconds, ".3f"),
        "of read bandwidth": lambda row: Cell(_number(row.bandwidth_share, ".0%")),
        "memory, MiB": lambda row: Cell(_number(row.peak_memory and row.peak_memory / 2**20, ",.0f")),
    }
    lines = [(row.workload, row.contender, row) for row in rows]
    return _table(f"Every method on every workload, batch {batch}", "method", columns, lines)


def _by_policy(report: Report, batch: int) -> Table:
    columns: Columns = {
        "over plain": lambda row: _spread(row.speedup, ".2f"),
        "tokens": _same,
        "predicted": lambda row: _spread(row.predicted, ".2f"),
        "measured ÷ predicted": lambda row: _spread(row.measured_over_predicted, ".2f"),
        "α": lambda row: _drafts(row, "alpha"),
        "τ": lambda row: _drafts(row, "mean_accepted_length"),
        "draft length": lambda row: _drafts(row, "mean_draft_length"),
        "ceiling": lambda row: _ceiling(row.ceiling),
        "tokens/s": lambda row: _spread(row.tokens_per_second, ".1f"),
    }
    rows = [row for row in report.policies if row.batch == batch]
    lines = [(f"{row.contender} on {row.workload}", row.policy or DASH, row) for row in rows]
    return _table(f"Every drafter under every policy, batch {batch}", "policy", columns, lines)


def _table(title: str, first: str, columns: Columns, lines: Sequence[tuple[str, str, Row]]) -> Table:
    """lines: headings of a group and of a line in it, and its row. A column without figures is left out."""
    made = [(group, own, row, [make(row) for make in columns.values()]) for group, own, row in lines]
    filled = [
        any(cells[place].text != DASH for _, _, row, cells in made if row.note is None)
        for place in range(len(columns))
    ]
    groups: dict[str, list[tuple[str, Row, list[Cell]]]] = {}
    for group, own, row, cells in made:
        kept = [cell for cell, some in zip(cells, filled, strict=True) if some]
        groups.setdefault(group, []).append((own, row, kept))
    return Table(
        title, first, tuple(name for name, some in zip(columns, filled, strict=True) if some), groups
    )


def _same(row: Row) -> Cell:
    """Whether the tokens were plain decoding's."""
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
    kind = "" if row.peer else "good" if exact.holds else "bad"
    mark = {"good": "✓ ", "bad": "✗ "}.get(kind, "")
    return Cell(f"{mark}{exact.identical} of {exact.prompts} same", where, kind)


def _over(peer: str) -> Callable[[Row], Cell]:
    return lambda row: _spread((row.over_peers or {}).get(peer), ".2f")


def _drafts(row: Row, field: str) -> Cell:
    return Cell(DASH if row.drafting is None else _number(getattr(row.drafting, field), ".2f"))


def _ceiling(ceiling: Ceiling | None) -> Cell:
    """With the draft length that it takes."""
    return Cell(DASH) if ceiling is None else Cell(f"{ceiling.speedup:.2f}", f"γ = {ceiling.draft_length}")


def _spread(spread: Spread | None, form: str) -> Cell:
    if spread is None:
        return Cell(DASH)
    quartiles = f"{spread.lower:{form}}–{spread.upper:{form}}" if spread.count > 1 else ""
    return Cell(f"{spread.median:{form}}", quartiles)


def _number(value: float | None, form: str) -> str:
    return DASH if value is None else f"{value:{form}}"
