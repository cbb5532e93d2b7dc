"""The tables of README and docs that hold measured figures, made of the committed results.

A table stands between two comments, of which the first names it; everything between them is written here.

    python benchmarks/figures.py          which pages do not say what the results say; exit code 1 if any
    python benchmarks/figures.py --write  make them say it
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from foredraft.bench.records import Report, Row, Spread
from foredraft.files import write_whole

HERE = Path(__file__).parent
PAGES = ("README.md", "docs/reproduction.md", "docs/guides/bild.md")
BLOCK = re.compile(
    r"(?<=<!-- figures: )(?P<name>[^>]*?)(?P<gap> -->\n)(?P<lines>.*?)(?=<!-- /figures -->)", re.S
)

Cells = Sequence[str]


@cache
def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@cache
def report(name: str) -> Report:
    return Report.from_dict(result(f"bench_demo_{name}"))


def rows(name: str, contender: str, workload: str | None = None, policy: str | None = None) -> list[Row]:
    """At batch 1, those with figures."""
    found = [
        row
        for row in report(name).rows
        if row.contender == contender and row.batch == 1 and row.speedup is not None
        if workload in (None, row.workload) and policy in (None, row.policy)
    ]
    assert found, (name, contender, workload, policy)
    return found


def table(head: Cells, *lines: Cells) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def span(values: Iterable[float | None], digits: int = 2) -> str:
    known = sorted(value for value in values if value is not None)
    low, high = (f"{value:.{digits}f}" for value in (known[0], known[-1]))
    return low if low == high else f"{low} to {high}"


def percent(values: Iterable[float | None]) -> str:
    return f"{span((value * 100 for value in values if value is not None), 0)} %"


def middle(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def gain(found: Sequence[Row]) -> str:
    return span(middle(row.speedup) for row in found)


def over(found: Sequence[Row], peer: str) -> str:
    return span(middle((row.over_peers or {}).get(peer)) for row in found)


def identical(found: Sequence[Row]) -> str:
    flags = [row.exactness for row in found if row.exactness is not None]
    if not all(flag.comparable for flag in flags):
        return "tested as a law"
    return f"{sum(flag.identical for flag in flags)} of {sum(flag.prompts for flag in flags)}"


def drafts(found: Sequence[Row], *names: str, digits: int = 2) -> list[str]:
    return [span((getattr(row.drafting, name) for row in found), digits) for name in names]


def speed() -> list[str]:
    def line(label: str, of: Callable[[str], str]) -> Cells:
        return label, of("greedy"), of("sampled")

    def gains(contender: str) -> Callable[[str], str]:
        return lambda name: gain(rows(name, contender))

    def every(name: str) -> list[Row]:
        return [row for row in report(name).rows if not row.peer and row.lossless and row.speedup is not None]

    def peers(contender: str, peer: str) -> Callable[[str], str]:
        return lambda name: over(rows(name, contender), peer) if name == "greedy" else ""

    return table(
        ("tokens/s, kinds of prompts from the worst to the best", "temperature 0", "temperature 1"),
        line("plain decoding ÷ `transformers`' `generate`", peers("plain", "transformers")),
        line("plain decoding ÷ llama.cpp", peers("plain", "llama.cpp")),
        line("draft model ÷ own plain decoding", gains("draft-model")),
        line(
            "draft model ÷ `transformers` with `assistant_model`",
            peers("draft-model", "transformers-assisted"),
        ),
        line("layer skipping, no second model ÷ own plain decoding", gains("layer-skip")),
        line("lookup ÷ own plain decoding", gains("lookup")),
        line("outputs identical to own plain decoding's", lambda name: identical(every(name))),
        line(
            "4-grams that repeat in an output", lambda name: percent(middle(r.repeated) for r in every(name))
        ),
    )


def speculative_sampling() -> list[str]:
    found = rows("greedy", "draft-model"), rows("sampled", "draft-model")
    return table(
        ("", "temperature 0", "temperature 1"),
        ("draft model ÷ own plain decoding", *map(gain, found)),
        ("α", *(drafts(each, "alpha")[0] for each in found)),
        ("τ", *(drafts(each, "mean_accepted_length", digits=1)[0] for each in found)),
        ("v(6)", *(_verifying(name, 6) for name in ("greedy", "sampled"))),
        ("measured ÷ predicted by τ, c and v", *(_foreseen(each) for each in found)),
        ("outputs identical to plain decoding's", *map(identical, found)),
    )


def _verifying(name: str, wide: int) -> str:
    return span(
        cost.v
        for costs in report(name).costs
        for cost in costs.verifying
        if cost.rows == wide and costs.batch == 1
    )


def _foreseen(found: Sequence[Row]) -> str:
    return span(middle(row.measured_over_predicted) for row in found)


def assisted_generation() -> list[str]:
    return table(
        ("", "tokens/s"),
        (
            "assisted generation ÷ plain generation, both `transformers`",
            over(rows("greedy", "transformers-assisted"), "transformers"),
        ),
        ("draft model ÷ assisted generation", over(rows("greedy", "draft-model"), "transformers-assisted")),
        ("own plain decoding ÷ plain generation", over(rows("greedy", "plain"), "transformers")),
    )


def _by_policy(*policies: str, contender: str = "draft-model") -> list[str]:
    lines = []
    for policy in policies:
        found = rows("policies", contender, policy=policy)
        lines.append(
            (
                f"`{policy}`",
                gain(found),
                *drafts(found, "alpha"),
                *drafts(found, "mean_accepted_length", "mean_draft_length", digits=1),
                _foreseen(found),
                identical(found),
            )
        )
    head = "draft model", "over own plain", "α", "τ", "drafted a round", "measured ÷ predicted", "identical"
    return table(head, *lines)


def the_cache() -> list[str]:
    (row,) = rows("greedy", "plain", "complete-function")
    (costs,) = [
        costs for costs in report("greedy").costs if costs.workload == row.workload and costs.batch == 1
    ]
    reading = middle(row.prefill_seconds)
    assert reading is not None
    step = costs.step_seconds
    return table(
        ("", "reading the prompt, ms", "a bare plain step, ms", "ratio"),
        (
            "demo target, median prompt of `complete-function`",
            f"{reading * 1e3:.1f}",
            f"{step * 1e3:.2f}",
            f"{reading / step:.0f}",
        ),
    )


def layer_skipping() -> list[str]:
    found = [
        (row.workload, policy, row, name)
        for name, policy in (
            ("policies", "auto"),
            ("policies", "fixed"),
            ("greedy", "fixed"),
            ("sampled", "fixed"),
        )
        for row in rows(name, "layer-skip", policy=policy)
    ]
    lines = []
    for workload, policy, row, name in found:
        costs = next(costs for costs in report(name).costs if costs.workload == workload and costs.batch == 1)
        assert row.ceiling is not None and row.perfect is not None
        lines.append(
            (
                f"`{workload}`, `{policy}`" + (", temperature 1" if name == "sampled" else ""),
                gain([row]),
                f"{costs.drafting['layer-skip'].first:.2f}, {costs.drafting['layer-skip'].further:.2f}",
                *drafts([row], "alpha"),
                *drafts([row], "mean_accepted_length", digits=1),
                f"{row.ceiling.speedup:.2f}, {row.perfect.speedup:.2f}",
                _foreseen([row]),
                percent([middle(row.repeated)]),
                identical([row]),
            )
        )
    return table(
        (
            "workload", "over own plain", "c of a first step, of others", "α", "τ", "ceiling at α, at 1",
            "measured ÷ predicted", "repeated", "identical",
        ),
        *lines,
    )  # fmt: skip


def the_search() -> list[str]:
    """A plan that was a finalist has its measured figures, whoever found it."""
    found = result("tune_demo")
    plans, uses_gumbel_argmax = found["plans"], {one["skips"]: one for one in found["finalists"]}
    named: dict[str, str] = {}  # a plan's spelling is told once

    def line(label: str, skips: str, predicted: float) -> Cells:
        cells = [label, f"as {named[skips]}" if skips in named else f"`{skips}`"]
        named.setdefault(skips, label)
        if (one := uses_gumbel_argmax.get(skips)) is None:
            return *cells, "", "", "", f"{predicted:.2f}", "", ""
        return (
            *cells,
            f"{one['c']:.2f}",
            f"{one['alpha']:.2f}",
            f"{one['predicted_tau']:.2f}, {one['tau']:.2f}",
            f"{predicted:.2f}",
            f"{one['speedup']['median']:.2f}",
            f"{one['prompts'] if one['identical'] else 'not all'} of {one['prompts']}",
        )

    lines = [line("the search, by prediction", plans["search"]["skips"], plans["search"]["predicted"])]
    if found["winner"] is not None:
        won = found["finalists"][found["winner"]]
        lines.append(line("the search, by the race", won["skips"], won["predicted"]))
    names = {
        "greedy": "greedy ranking",
        "clasp": "dynamic programme (CLaSp)",
        "random of its size": "best of {} random ones of its size",
    }
    for key, label in names.items():
        plan = plans[key]
        lines.append(line(label.format(f"{plan['plans']:,}"), plan["skips"], plan["predicted"]))
    head = "plan found by", "plan", "c", "α", "predicted τ, decoded τ"
    return table((*head, "predicted S", "measured S", "identical"), *lines)


def big_little_decoder() -> list[str]:
    plain, *others = result("bild")["rows"]
    lines = []
    for row in others:
        if row["fallback"] == 0.9 or row["rollback"] not in (None, 5.0):
            continue
        rule = (
            f"`bild`, rollback {row['rollback']:g}"
            if row["rollback"]
            else "the fallback policy alone, lossless"
        )
        lines.append(
            (
                f"{rule}, fallback {row['fallback']:g}",
                f"{row['over_plain']['median']:.2f}",
                percent([row["exact"]]),
                f"{row['loss']:.3f}, {plain['loss']:.3f}",
                percent([row["repeated_4grams"]]),
            )
        )
    head = (
        "",
        "over own plain",
        "outputs that are plain's",
        "loss under the target, plain's beside it",
        "repeated",
    )
    return table(head, *lines)


def the_lossy_rule() -> list[str]:
    """The whole grid."""

    def line(row: dict[str, Any]) -> Cells:
        speed = row["over_plain"]
        return (
            "" if row["fallback"] is None else f"{row['fallback']:g}",
            row["mode"],
            f"{speed['median']:.2f} ({speed['lower']:.2f} to {speed['upper']:.2f})",
            f"{row['loss']:.3f}",
            percent([row["exact"]]),
            percent([row["up_to_the_first_other"]]),
            f"{row['mean_accepted_length']:.2f}",
            percent([row["repeated_4grams"]]),
        )

    head = "fallback", "mode", "over plain (quartiles)", "loss", "exact", "to first other", "τ", "repeated"
    return table(head, *map(line, result("bild")["rows"]))


TABLES: dict[str, Callable[[], list[str]]] = {
    "speed": speed,
    "speculative sampling": speculative_sampling,
    "assisted generation": assisted_generation,
    "assisted policies": lambda: _by_policy("heuristic", "confidence"),
    "the cache": the_cache,
    "layer skipping": layer_skipping,
    "the search": the_search,
    "adaptive exit": lambda: _by_policy("fixed", "confidence", "adaptive-exit", "auto"),
    "gate": lambda: _by_policy("target-confidence"),
    "big little decoder": big_little_decoder,
    "the lossy rule": the_lossy_rule,
}


def brought_up_to_date(page: str) -> str:
    """The page with its tables as the results have them. Raises KeyError of a table that there is not."""
    return BLOCK.sub(lambda found: f"{found['name']}{found['gap']}{_lines(found['name'])}", page)


def _lines(name: str) -> str:
    return "\n" + "\n".join(TABLES[name]()) + "\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    stale = False
    for name in PAGES:
        path = HERE.parent / name
        page = path.read_text(encoding="utf-8")
        made = brought_up_to_date(page)
        if made == page:
            continue
        stale = True
        if options.write:
            write_whole(path, made, "the page")
        print(f"{name}: {'written' if options.write else 'does not say what the results say'}")
    return 1 if stale and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
