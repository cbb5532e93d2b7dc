"""The page of a verification, made of its records: verdict, identity of tokens, and chi-square tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    plain,
    render,
)
from foredraft.verify.verify_records import DistributionTest, DraftPosition, Identity, TextRun, VerifyReport

VERDICTS = {
    "passed": PageVerdict("good", "Passed: no difference from plain decoding was found."),
    "failed": PageVerdict("bad", "Failed: the output differs from plain decoding's, or a request failed."),
    "inconclusive": PageVerdict(
        "doubtful", "Inconclusive: no difference was found, but one could have been missed."
    ),
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
    return render(
        ReportPage(
            title="Foredraft verification",
            verdicts=[_verdict(report) for report in reports],
            facts=_facts(first, names),
            tables=[table for report in reports for table in _tables(report)],
            remark=REMARK.format(
                power=first.power, level=min(test.level for test in first.tests), family=first.family_level
            ),
            plots=[plot for report in reports for plot in (_p_values(report), *_detection(report))],
            notes=[f"Weak evidence: {doubt}." for report in reports for doubt in report.doubts],
            details={"Set-up": plain(first.about)},
        )
    )


def _verdict(report: VerifyReport) -> PageVerdict:
    if report.planted is None:
        return VERDICTS[report.verdict]
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
    suffix = "" if report.planted is None else f", with {report.planted} planted"
    identities = {}
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
    lines = [Line(_name(test), _cells(test)) for test in report.tests]
    yield Table(
        f"Samples against the target's exact distribution{suffix}",
        "test",
        ("samples", "cells", "χ²", "p-value", "detects", "accepted", "outcome"),
        {"": lines},
    )
    by_position = {
        _name(test): [_position(each) for each in test.positions] for test in report.tests if test.positions
    }
    if by_position:
        columns = ("tokens", "corrected", "χ²", "p-value", "detects", "corrections", "outcome")
        yield Table(f"Tokens by position of the draft{suffix}", "position", columns, by_position)


def _identity(identity: Identity, run: TextRun) -> Line:
    name = f"{run.drafter}{', drafting always' if run.always else ''}"
    name += ", in a batch" if run.batched else ", one at a time"
    same = f"{identity.prompts - identity.diverged(run)} of {identity.prompts}"
    if identity.errors:
        return Line(name, (), f"failed: {identity.errors[0]}")
    first = next((each for each in identity.divergences if each.run == run), None)
    if first is None:
        return Line(name, [Cell(f"✓ {same}", kind="good"), Cell(DASH), Cell(DASH)])
    place = Cell(f"prompt {first.prompt}, new token {first.position}")
    return Line(name, [Cell(f"✗ {same}", kind="bad"), place, Cell(f"{first.margin:.3g}")])


def _name(test: DistributionTest) -> str:
    drafter = "none (control)" if test.control else test.drafter
    weaker = f", logits / {test.draft_temperature:g}" if test.draft_temperature != 1 else ""
    return f"prompt {test.prompt}, {drafter}{weaker}, {test.acceptance}, {test.setting}"


def _cells(test: DistributionTest) -> list[Cell]:
    failure = f"✗ {test.impossible} impossible" if test.impossible else "✗ failed"
    figures = f"{test.statistic:.2f}", f"{test.p_value:.2g}", f"{test.detectable:.4f}"
    accepted = f"{test.accepted / test.drafted:.0%}" if test.drafted else DASH
    return [
        *map(Cell, (str(test.samples), str(test.cells), *figures, accepted)),
        Cell("✓ passed", kind="good") if test.joint_passed else Cell(failure, "; ".join(test.errors), "bad"),
    ]


def _position(each: DraftPosition) -> Line:
    counts = str(each.tokens), DASH if each.bonus else str(each.corrections)
    figures, outcome = (DASH,) * 4, Cell("too few tokens")
    if each.tested:
        corrections = f"{each.detectable_correction:.4f}" if each.corrections else DASH
        figures = f"{each.statistic:.2f}", f"{each.p_value:.2g}", f"{each.detectable:.4f}", corrections
        outcome = Cell("✗ failed", kind="bad") if each.failed else Cell("✓ passed", kind="good")
    place = "bonus" if each.bonus else str(each.position + 1)
    return Line(place, [*map(Cell, (*counts, *figures)), outcome])


def _p_values(report: VerifyReport) -> Plot:
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


def _detection(report: VerifyReport) -> list[Plot]:
    best = report.best_by_position
    if not best:
        return []
    positions = [each.position + 1 for each in best]
    points = Points("", positions, [each.detectable_correction for each in best], 0, "line")
    axis = Axis("distance", low=0, grid=True)
    plot = make_plot(
        "detection" if report.planted is None else f"detection-{report.planted}",
        f"What the tests by position detect{_planted(report)}",
        f"The smallest total variation distance of the corrections that some test detects with probability"
        f" {report.power:g}; lower is better.",
        [f"position {each.position + 1} {each.detectable_correction:.3f}" for each in best],
        [Panel(150, [points], axis)],
        Axis("position in the draft", whole=True),
    )
    return [plot]


def _planted(report: VerifyReport) -> str:
    return "" if report.planted is None else f", with {report.planted} planted"
