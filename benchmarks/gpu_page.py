"""The page beside the result of `gpu.py`: what to look at first, and then a line for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHARE = 0.8  # of the copy bandwidth that a plain step at batch size 1 should reach
PREDICTED = 0.9  # of the predicted speed-up that a run should reach

Result = dict[str, Any]


def page(result: Result) -> str:
    """Return the page of a result, in Markdown."""
    stages: dict[str, Result] = result["stages"]
    first = list(_first(stages))
    lines = [f"# Foredraft on {result['machine'].get('device', 'a CPU')}", ""]
    lines += ["## Look at first", ""]
    lines += [f"{place}. {finding}" for place, finding in enumerate(first, 1)] or ["Nothing stands out."]
    lines += ["", "## Stages", "", "| stage | seconds | found |", "|---|---|---|"]
    lines += [f"| {name} | {stage['seconds']:.0f} | {_found(stage)} |" for name, stage in stages.items()]
    return "\n".join(lines) + "\n"


def _first(stages: dict[str, Result]) -> Iterator[str]:
    """Yield what is wrong, the worst first: texts that differ, stages that failed, then what is slow."""
    for name, stage in stages.items():
        if stage.get("identical") is False:
            yield f"**{name}: the texts of drafting differ from plain decoding's.**"
        for test in stage.get("identities", ()):
            if not test["passed"]:
                found = [*test["divergences"], *test["errors"]]
                yield f"**{name}: texts differ from plain decoding's, or failed**: {found[0]}"
        if stage.get("verdict") == "failed":
            yield f"**{name}: the verification failed**"
        for row in stage.get("rows", ()):
            exactness = row.get("exactness") or {}
            if row.get("lossless") and not row.get("peer") and exactness.get("first"):
                yield f"**{name}: {row['contender']} differs from plain decoding**: {exactness['first']}"
    for name, stage in stages.items():
        if "error" in stage:
            yield f"{name} failed: {stage['error'].splitlines()[0]}"
        for contender, found in stage.get("contenders", {}).items():
            if "error" in found:
                yield f"{name}: {contender} failed: {found['error'].splitlines()[0]}"
    for name, stage in stages.items():
        for way, costs in stage.items():
            if isinstance(costs, dict) and "one fixed shape" in str(costs.get("shapes", "")):
                yield f"{name}, {way}: the self-check found no shapes, so every pass has one fixed shape"
        share = stage.get("contenders", {}).get("foredraft", {}).get("fraction_of_bandwidth")
        if share is not None and share < SHARE:
            yield f"{name}: a plain step reads at {share:.2f} of the copy bandwidth (expected {SHARE})"
        ratio = stage.get("measured_over_predicted")
        if ratio is not None and ratio < PREDICTED:
            yield f"{name}: drafting reaches {ratio:.2f} of the predicted speed-up (expected {PREDICTED})"
        for row in stage.get("rows", ()):
            speedup = (row.get("speedup") or {}).get("median")
            if speedup is not None and not row["peer"] and row["contender"] == "auto" and speedup < 1:
                yield f"{name}: auto takes {1 / speedup:.2f} of plain decoding's time"


def _found(stage: Result) -> str:
    """Return what a stage found, in a few words."""
    if "error" in stage:
        return "failed"
    if "skipped" in stage:
        return str(stage["skipped"])
    if "summary" in stage:
        return str(stage["summary"])
    if "contenders" in stage:
        speeds = [
            f"{name} {found['tokens_per_second']['median']:.1f}"
            for name, found in stage["contenders"].items()
            if "tokens_per_second" in found
        ]
        return "tokens/s: " + ", ".join(speeds)
    if "speedup" in stage:
        return f"{stage['speedup']['median']:.2f} x plain, alpha {stage['alpha']:.2f}"
    if "rows" in stage:
        rows = [row for row in stage["rows"] if row.get("speedup")]
        speeds = [f"{row['contender']} {row['speedup']['median']:.2f}" for row in rows]
        return "x plain: " + ", ".join(speeds)
    if "verdict" in stage:
        return str(stage["verdict"])
    return "see the result file"
