"""The report of `foredraft verify` as text: sentences and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from foredraft.cli.layout import table, with_weights
from foredraft.kinds import DRAFTERS
from foredraft.verify.defects import DEFECTS

if TYPE_CHECKING:
    from foredraft.verify import DistributionTest, Divergence, DraftPosition, Identity, VerifyReport
    from foredraft.verify.verify_records import TextRun

__all__ = ["Names", "defect_name", "lines"]

Names: TypeAlias = dict[str, str | None]  # "model" and "draft" -> what the user gave for them

COLUMNS = (
    "prompt",
    "drafter",
    "acceptance",
    "settings",
    "samples",
    "cells",
    "chi2",
    "p-value",
    "detects",
    "accepted",
    "",
)
ALWAYS = "drafting always"  # of runs in which every round drafts
POSITIONS = ("position", "tokens", "corrected", "chi2", "df", "p-value", "detects", "if corrected", "")


def lines(report: VerifyReport, names: Names, width: int | None = None) -> list[str]:
    """Return the report as sentences and tables, at most `width` characters wide."""
    room = None if width is None else width - 2
    return [
        header(report, names),
        "",
        *(line for identity in report.identities for line in identity_lines(identity)),
        "",
        *test_lines(report, room),
        "",
        *position_lines(report, room),
        power(report),
        "Not covered: differences within a cell, other prompts and sampling settings, and longer samples.",
        *[f"Weak evidence: {doubt}." for doubt in report.doubts],
        conclusion(report),
    ]


def header(report: VerifyReport, names: Names) -> str:
    """Return one line on what was tested, and on which machine."""
    about = report.about
    drafters = ", ".join(described(name, about["plan"], names["draft"]) for name in about["drafters"])
    drafters = drafters if about["drafters"] == [about["drafter"]] else f"{about['drafter']} ({drafters})"
    target = " + ".join([str(names["model"]), *about.get("lora", ())])
    return (
        f"Target {target}, {with_weights(about['dtype'], about['weights'])} on {about['device']}"
        f"{'' if about['deterministic'] else ', not deterministic'}; drafter {drafters}"
        f"{', greedy' if about['greedy_drafts'] else ''}, policy {about['policy']}; up to"
        f" {about['max_batch']} sequences in a batch; {about['threads']} threads; foredraft"
        f" {about['foredraft']}, PyTorch {about['torch']}, Python {about['python']}, {about['system']}"
    )


def described(drafter: str, plan: str | None, draft: str | None) -> str:
    """Return a drafter with the plan or the draft model that it drafts with."""
    asset = {"plan": plan, "draft": draft}.get(DRAFTERS[drafter].given_by or "")
    return drafter if asset is None else f"{drafter} ({asset})"


def identity_lines(identity: Identity) -> list[str]:
    """Return the results of one comparison of texts."""
    rule = f", {identity.acceptance} with seeds" if identity.acceptance else ""
    found = [
        f"New tokens at {identity.setting}{rule}, compared with plain decoding of one prompt at a time:"
        f" {identity.prompts} prompts, {identity.tokens} tokens"
    ]
    for run in identity.runs:
        same = identity.prompts - identity.diverged(run)
        found.append(f"  {described_run(run)}: {same} of {identity.prompts} identical")
    found += [f"  {divergence_line(divergence)}" for divergence in identity.divergences]
    return found + [f"  failed: {error}" for error in identity.errors]


def described_run(run: TextRun) -> str:
    """Return how a run decoded its prompts."""
    always = f", {ALWAYS}" if run.always else ""
    return f"{run.drafter}{always}, {'in a batch' if run.batched else 'one at a time'}"


def divergence_line(found: Divergence) -> str:
    """Return one line on a divergence, with the target's margin there."""

    def name(token: int | None) -> str:
        return "the end" if token is None else f"token {token}"

    seed = "" if found.seed is None else f", seed {found.seed}"
    return (
        f"prompt {found.prompt}, {described_run(found.run)}{seed}, new token {found.position}:"
        f" {name(found.found)} instead of {name(found.expected)}; the target's two most likely tokens there"
        f" are {found.best[0]} (logit {found.logits[0]:.6g}) and {found.best[1]} (logit"
        f" {found.logits[1]:.6g}), margin {found.margin:.3g}"
    )


def test_lines(report: VerifyReport, width: int | None) -> list[str]:
    """Return the chi-square tests as a table, at most `width` characters wide."""
    first = report.tests[0]
    return [
        f"Chi-square tests of the joint distribution of {first.tokens} sampled tokens against the target's"
        f" exact one: {len(report.tests)} tests, each at level {first.level:.2g}, as the tests by position"
        f" ({report.family_level:g} together), seed {report.seed}{in_turns(report)}",
        *[f"  {line}" for line in table([COLUMNS, *map(row, report.tests)], width, keys=4)],
        *[f"  failed: {error}" for test in report.tests for error in test.errors],
    ]


def in_turns(report: VerifyReport) -> str:
    """Return a clause on the drafters of the samples, where the policy chooses among several."""
    always = any(run.always for run in report.identities[0].runs)
    turns = (
        f", {' and '.join(report.about['drafters'])} in turns" if len(report.about["drafters"]) > 1 else ""
    )
    return f"; {ALWAYS}{turns}" if always else ""


def row(test: DistributionTest) -> tuple[str, ...]:
    """Return a test's cells of the table."""
    failure = f"{test.impossible} impossible" if test.impossible else "FAILED"
    return (
        str(test.prompt),
        "none (control)" if test.control else drafter_of(test),
        test.acceptance,
        str(test.setting),
        str(test.samples),
        str(test.cells),
        f"{test.statistic:.2f}",
        f"{test.p_value:.2g}",
        f"{test.detectable:.4f}",
        f"{test.accepted / test.drafted:.0%}" if test.drafted else "-",
        "ok" if test.joint_passed else failure,
    )


def drafter_of(test: DistributionTest) -> str:
    """Return the drafter of a test, with its draft temperature where that is not 1."""
    return test.drafter + (f", logits / {test.draft_temperature:g}" if test.draft_temperature != 1 else "")


def position_lines(report: VerifyReport, width: int | None) -> list[str]:
    """Return the tests by draft position as tables, at most `width` characters wide."""
    found: list[str] = []
    for test in report.tests:
        if test.positions:
            found.append(
                f"Tokens by position of the draft, given the text before them: prompt {test.prompt},"
                f" {drafter_of(test)}, {test.setting}"
            )
            rows = table([POSITIONS, *map(position_row, test.positions)], width)
            found += [f"  {line}" for line in rows]
    if found:
        found += [
            "  detects: total variation distance of these tokens; if corrected: of the corrections alone",
            "",
        ]
    return found


def position_row(position: DraftPosition) -> tuple[str, ...]:
    """Return a position's cells of the table; positions count from 1."""
    tested, corrected = position.tested, position.corrections > 0
    return (
        "bonus" if position.bonus else str(position.position + 1),
        str(position.tokens),
        "-" if position.bonus else str(position.corrections),
        f"{position.statistic:.2f}" if tested else "-",
        str(position.degrees),
        f"{position.p_value:.2g}" if tested else "-",
        f"{position.detectable:.4f}" if tested else "-",
        f"{position.detectable_correction:.4f}" if tested and corrected else "-",
        "FAILED" if position.failed else "ok" if tested else "too few",
    )


def power(report: VerifyReport) -> str:
    """Return one line on the difference that the tests detect."""
    by_position = [
        f"{each.detectable_correction:.3f} at draft position {each.position + 1}"
        for each in report.best_by_position
    ]
    along = f" For corrections alone, some test does so at {', '.join(by_position)}." if by_position else ""
    return (
        f"Every full test of the drafter fails with probability {report.power:g} or more if the total"
        f" variation distance between the output's and the target's distribution over its cells is"
        f" {report.detectable:.4f} or more.{along}"
    )


def defect_name(report: VerifyReport) -> str:
    """Return the name of the planted defect, and what is wrong."""
    assert report.planted is not None
    return f"{report.planted}: {DEFECTS[report.planted].summary}"


def conclusion(report: VerifyReport) -> str:
    """Return one line on the outcome."""
    if report.planted is not None:
        found = "was found" if report.found_planted else "was NOT found: these tests prove nothing here"
        return f"SELF-TEST: the planted defect ({defect_name(report)}) {found}."
    return {
        "passed": "PASSED: no difference from plain decoding was found.",
        "failed": "FAILED: the output differs from plain decoding's, or a request failed.",
        "inconclusive": "INCONCLUSIVE: no difference was found, but one could have been missed.",
    }[report.verdict]
