"""The page of a verification, made of its records: verdict, identity of tokens, and chi-square tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foredraft.bench.settings import DEFECTS
from foredraft.pages.report_page import (
    DASH,
    Axis,
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
from foredraft.verify.verify_records import (
    FAILED,
    MEANINGS,
    NONE,
    PASSED,
    POSITIONS,
    TOO_FEW,
    DistributionTest,
    DraftPosition,
    Identity,
    TextRun,
    VerifyReport,
)

KINDS = {"passed": "good", "failed": "bad", "inconclusive": "doubtful"}
OUTCOMES = {
    PASSED: Cell("✓ passed", kind="good"),
    FAILED: Cell("✗ failed", kind="bad"),
    TOO_FEW: Cell("too few tokens"),
}
REMARK = (
    "Detects: the smallest total variation distance between the output's and the target's distribution"
    " that a test detects with probability {power:g}. Corrections: the same for corrected tokens alone."
    " Every test has the level {level:.2g}, and all together fail with probability {family:g} although"
    " nothing is wrong. Not covered: differences within a cell, other prompts and sampling settings, and"
    " longer samples."
)
LEAST = 1e-12  # p-values below it are drawn at it


def verification_page(reports: Sequence[VerifyReport], names: Mapping[str, str | None]) -> str:
    """Return the whole HTML document."""
    first = reports[0]
    return ReportPage(
        title="Foredraft verification",
        verdicts=[_verdict(report) for report in reports],
        facts=_facts(first, names),
        tables=[table for report in reports for table in _tables(report)],
        remark=REMARK.format(
            power=first.power, level=min(test.level for test in first.tests), family=first.family_level
        ),
        plots=[plot for report in reports for plot in (_p_values(report), _detection(report))],
        notes=[f"Weak evidence: {doubt}." for report in reports for doubt in report.doubts],
        details={"Set-up": first.about},
    ).html()


def _verdict(report: VerifyReport) -> PageVerdict:
    if report.planted is None:
        verdict = report.verdict
        return PageVerdict(KINDS[verdict], f"{verdict.capitalize()}: {MEANINGS[verdict]}")
    defect = f"The planted defect ({report.planted}: {DEFECTS[report.planted].summary})"
    if report.found_planted:
        return PageVerdict("good", f"{defect} was found.")
    return PageVerdict("bad", f"{defect} was not found: these tests prove nothing here.")


def _facts(report: VerifyReport, names: Mapping[str, str | None]) -> dict[str, str]:
    about: dict[str, Any] = report.about
    draft = f" ({names['draft']})" if names["draft"] is not None else ""
    return {
        "target": f"{names['model']}, {about['dtype']} on {about['device']}",
        "drafter": f"{about['drafter']}{draft}, policy {about['policy']}",
        "texts": f"{report.identities[0].prompts} prompts, up to {about['max_batch']} sequences in a batch",
        "detects": f"a total variation distance of {report.detectable:.4f} in every full test",
    }


def _tables(report: VerifyReport) -> Iterator[Table]:
    suffix, identities = _planted(report), {}
    for each in report.identities:
        rule = f", {each.acceptance} with seeds" if each.acceptance else ""
        heading = f"{each.setting}{rule}: {each.prompts} prompts, {each.tokens} tokens"
        identities[heading] = [_identity(each, run) for run in each.runs]
    yield Table(
        f"The same tokens as plain decoding{suffix}",
        "run",
        ("identical", "first difference", "target's margin there"),
        identities,
    )
    lines = [Line(_name(test), _cells(test.line, "; ".join(test.errors))) for test in report.tests]
    yield Table(
        f"Samples against the target's exact distribution{suffix}",
        "test",
        ("samples", "cells", "χ²", "p-value", "detects", "accepted", "outcome"),
        {"": lines},
    )
    by_position = {
        _name(test): [_position(each) for each in test.positions] for test in report.tests if test.positions
    }
    columns = ("tokens", "corrected", "χ²", "p-value", "detects", "corrections", "outcome")
    yield Table(f"Tokens by position of the draft{suffix}", "position", columns, by_position)


def _identity(identity: Identity, run: TextRun) -> Line:
    name, same = str(run), f"{identity.prompts - identity.diverged(run)} of {identity.prompts}"
    if identity.errors:
        return Line(name, (), f"failed: {identity.errors[0]}")
    first = next((each for each in identity.divergences if each.run == run), None)
    if first is None:
        return Line(name, [Cell(f"✓ {same}", kind="good"), Cell(DASH), Cell(DASH)])
    place = Cell(f"prompt {first.prompt}, new token {first.position}")
    return Line(name, [Cell(f"✗ {same}", kind="bad"), place, Cell(f"{first.margin:.3g}")])


def _name(test: DistributionTest) -> str:
    return f"prompt {test.prompt}, {test.described_drafter}, {test.acceptance}, {test.setting}"


def _cells(line: Sequence[str], errors: str = "") -> list[Cell]:
    """Return the cells of a record's line, whose last one is the outcome."""
    *figures, outcome = line
    last = OUTCOMES.get(outcome) or Cell(f"✗ {outcome}", kind="bad")
    return [*(Cell(DASH if text == NONE else text) for text in figures), replace(last, more=errors)]


def _position(each: DraftPosition) -> Line:
    place, *line = each.line
    del line[POSITIONS.index("df") - 1]
    return Line(place, _cells(line))


def _p_values(report: VerifyReport) -> Plot | None:
    """Draw the p-value of every test: without a difference, they are spread evenly from 0 to 1."""
    groups = {"drafter": False, "control": True}
    marks = []
    for number, (label, control) in enumerate(groups.items()):
        own = [(at, test) for at, test in enumerate(report.tests, start=1) if test.control is control]
        if own:
            numbers, tests = zip(*own, strict=True)
            marks.append(Points(label, numbers, [max(LEAST, test.p_value) for test in tests], number))
    level = min(test.level for test in report.tests)
    powers = range(-12, 1, 3)
    axis = Axis(
        "p-value", low=LEAST / 3, high=3.0, ticks={10.0**n: "1" if n == 0 else f"1e{n}" for n in powers},
        log=True, grid=True,
    )  # fmt: skip
    return make_plot(
        "p-values" if report.planted is None else f"p-values-{report.planted}",
        f"The tests of samples{_planted(report)}",
        f"The p-value of each test, in the order of the table; below the dashed line, {level:.2g}, it fails.",
        [f"{_name(test)} {test.p_value:.2g}" for test in report.tests],
        [Panel(150, [*marks, ReferenceLine(y=level)], axis)],
        Axis("test", whole=True),
    )


def _detection(report: VerifyReport) -> Plot | None:
    best = report.best_by_position
    positions = [each.position + 1 for each in best]
    points = Points("", positions, [each.detectable_correction for each in best], 0, "line")
    axis = Axis("distance", low=0, grid=True)
    return make_plot(
        "detection" if report.planted is None else f"detection-{report.planted}",
        f"What the tests by position detect{_planted(report)}",
        f"The smallest total variation distance of the corrections that some test detects with probability"
        f" {report.power:g}; lower is better.",
        [f"position {each.position + 1} {each.detectable_correction:.3f}" for each in best],
        [Panel(150, [points], axis)],
        Axis("position in the draft", whole=True),
    )


def _planted(report: VerifyReport) -> str:
    return "" if report.planted is None else f", with {report.planted} planted"
