"""`foredraft verify`: check on the user's machine that speculative decoding does not change the output.

The exit code is 0 if every check passed, 1 if one failed, and 3 if none failed but the evidence is weak. With
--self-test a defect is planted: the code is 1 if the tests found it, and 3 if they did not. `--self-test all`
plants one defect after the other, and the code is 1 if the tests found every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from cyclopts import Group

from foredraft.bench.contenders import ALL
from foredraft.bench.settings import DEFAULT_DEFECT, DEFECTS, no_drafter, without_prefill
from foredraft.cli.interrupt import FAILED, INCONCLUSIVE
from foredraft.cli.options import (
    HTML,
    DocumentOptions,
    DraftOptions,
    ModelOptions,
    PromptOptions,
    bullets,
    check_drafting_options,
    drafter_name,
    load_options,
    refuse_lossy,
)
from foredraft.cli.prompts import read_prompts
from foredraft.cli.render import started
from foredraft.cli.sections import NONE, Given, declared_in, measured, option, section
from foredraft.cli.words import check_places, print_error, table, with_weights, write_report
from foredraft.errors import ConfigError
from foredraft.kinds.tables import DRAFTERS
from foredraft.verify import Divergence, Identity, VerifyReport, VerifySettings
from foredraft.verify.verify_records import ALWAYS, MEANINGS, POSITIONS, TESTS, Verdict

if TYPE_CHECKING:
    from foredraft.bench.workload import PromptForm
    from foredraft.cli.render import ProgressBars
    from foredraft.model.tokenizer import Tokenizer

VERIFY = {
    "prompts": option(
        str,
        'File of prompts: one per line, or .jsonl with a "prompt" in every line. Default: the prompts that'
        " ship with Foredraft.",
    ),
    **measured(VerifySettings),
    "self_test": option(
        str,
        f"Plant a defect and check that the tests find it; the exit code is then 1. Without a name:"
        f" {DEFAULT_DEFECT}.\n\n"
        + bullets(
            {name: defect.summary for name, defect in DEFECTS.items()} | {ALL: "each in turn"}
        ).rstrip(),
    ),
    **HTML,
}
if TYPE_CHECKING:
    VerifyOptions: TypeAlias = Given
else:
    VerifyOptions = section(
        "VerifyOptions", Group("Verifying", sort_key=3), VERIFY, ["prompts", "tokens", "detect", "html"]
    )

Names: TypeAlias = dict[str, str | None]  # "model" and "draft" -> what the user gave for them
KEYS = ("prompt", "drafter", "acceptance", "settings")  # columns that tell a test from the others


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
    asset = {"plan": plan, "draft": draft}.get(DRAFTERS[drafter].given_by or "")
    return drafter if asset is None else f"{drafter} ({asset})"


def identity_lines(identity: Identity) -> list[str]:
    rule = f", {identity.acceptance} with seeds" if identity.acceptance else ""
    prompts = identity.prompts
    return [
        f"New tokens at {identity.setting}{rule}, compared with plain decoding of one prompt at a time:"
        f" {prompts} prompts, {identity.tokens} tokens",
        *(f"  {run}: {prompts - identity.diverged(run)} of {prompts} identical" for run in identity.runs),
        *(f"  {divergence_line(divergence)}" for divergence in identity.divergences),
        *(f"  failed: {error}" for error in identity.errors),
    ]


def divergence_line(found: Divergence) -> str:
    """Return one line on a divergence, with the target's margin there."""

    def name(token: int | None) -> str:
        return "the end" if token is None else f"token {token}"

    seed = "" if found.seed is None else f", seed {found.seed}"
    return (
        f"prompt {found.prompt}, {found.run}{seed}, new token {found.position}:"
        f" {name(found.found)} instead of {name(found.expected)}; the target's two most likely tokens there"
        f" are {found.best[0]} (logit {found.logits[0]:.6g}) and {found.best[1]} (logit"
        f" {found.logits[1]:.6g}), margin {found.margin:.3g}"
    )


def test_lines(report: VerifyReport, width: int | None) -> list[str]:
    """Return the chi-square tests as a table, at most `width` characters wide."""
    first, drafters = report.tests[0], report.about["drafters"]
    rows = [
        (str(test.prompt), test.described_drafter, test.acceptance, str(test.setting), *test.line)
        for test in report.tests
    ]
    turns = f", {' and '.join(drafters)} in turns" if len(drafters) > 1 else ""
    always = f"; {ALWAYS}{turns}" if any(run.always for run in report.identities[0].runs) else ""
    return [
        f"Chi-square tests of the joint distribution of {first.tokens} sampled tokens against the target's"
        f" exact one: {len(report.tests)} tests, each at level {first.level:.2g}, as the tests by position"
        f" ({report.family_level:g} together), seed {report.seed}{always}",
        *[f"  {line}" for line in table([(*KEYS, *TESTS), *rows], width, keys=len(KEYS))],
        *[f"  failed: {error}" for test in report.tests for error in test.errors],
    ]


def position_lines(report: VerifyReport, width: int | None) -> list[str]:
    """Return the tests by draft position as tables, at most `width` characters wide."""
    found: list[str] = []
    for test in (test for test in report.tests if test.positions):
        found.append(
            f"Tokens by position of the draft, given the text before them: prompt {test.prompt},"
            f" {test.described_drafter}, {test.setting}"
        )
        lines = table([POSITIONS, *(each.line for each in test.positions)], width)
        found += [f"  {line}" for line in lines]
    note = "  detects: total variation distance of these tokens; if corrected: of the corrections alone"
    return [*found, note, ""] if found else []


def power(report: VerifyReport) -> str:
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
    assert report.planted is not None
    return f"{report.planted}: {DEFECTS[report.planted].summary}"


def conclusion(report: VerifyReport) -> str:
    if report.planted is not None:
        found = "was found" if report.found_planted else "was NOT found: these tests prove nothing here"
        return f"SELF-TEST: the planted defect ({defect_name(report)}) {found}."
    return f"{report.verdict.upper()}: {MEANINGS[report.verdict]}"


EXIT_CODES = {"passed": 0, "failed": FAILED, "inconclusive": INCONCLUSIVE}


def verify(
    *texts: str,
    verifying: VerifyOptions = NONE,
    model: ModelOptions = NONE,
    drafting: DraftOptions = NONE,
    prompting: PromptOptions = PromptOptions(),
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Verify that the drafter does not change the output.

    At temperature 0, and with a seed under acceptance rule coupled, the new tokens must be identical to plain
    decoding's, one prompt at a time and in a batch. Above temperature 0, chi-square tests compare samples of
    four tokens with the target's exact distribution, jointly and by position of the draft, and the report
    states which difference they detect.

    Parameters
    ----------
    texts
        Prompts to continue; - reads one from stdin.
    """
    check_drafting_options(model, drafting)
    refuse_lossy(drafting)
    html = verifying.get("html")
    check_places(out=output.out, html=html)
    if drafter_name(drafting, model) == "none":
        raise no_drafter()
    form = prompting.form
    prompts = read_prompts(texts, verifying.get("prompts"), model.get("model"))
    options = options_of(verifying, drafting)
    with started() as bars:
        reports = run(prompts, form, options, model, drafting, bars)
    names: Names = {
        "model": model.get("model", "demo"),
        "draft": drafting.get("draft", None if "model" in model else "demo"),
    }
    documents = [report.as_dict() for report in reports]
    for document in documents:
        document["about"] = names | {"chat": form.chat, "system_message": form.system} | document["about"]
    several = {"verdict": overall(reports), "self_tests": documents}
    from foredraft.pages.verification import verification_page

    with suppress(BrokenPipeError):  # the exit code is the verdict, even if the reader closed the pipe
        write_report(
            several if verifying.get("self_test") == ALL else documents[0],
            lambda width: [line for report in reports for line in lines(report, names, width)],
            output,
            html=html,
            page=lambda: verification_page(reports, names),
        )
    for report in reports:
        if report.planted is not None and not report.found_planted:
            print_error(f"the planted defect ({defect_name(report)}) was NOT found")
    return EXIT_CODES[overall(reports)]


def overall(reports: Sequence[VerifyReport]) -> Verdict:
    verdicts = {report.verdict for report in reports}
    return verdicts.pop() if len(verdicts) == 1 else "inconclusive"


def run(
    prompts: list[str],
    form: PromptForm,
    each: Sequence[VerifySettings],
    model: Given,
    drafting: Given,
    bars: ProgressBars,
) -> list[VerifyReport]:
    """Load the models with room for the verification, and run it with each of the options."""
    from foredraft.loading import load_for
    from foredraft.verify import verify as run_checks
    from foredraft.verify.sampler import BATCH
    from foredraft.verify.verify_run import max_new_tokens

    def needs(tokenizer: Tokenizer | None, defaults: object) -> tuple[int, int]:
        longest = 0 if tokenizer is None else form.longest(tokenizer, prompts)
        return BATCH, longest + max_new_tokens(each[0])

    loading = load_options(model, drafting)
    llm = load_for(needs, model.get("model"), **loading, progress=without_prefill(bars.show))
    applied = form.applied(llm.tokenizer, prompts)
    return [
        run_checks(llm, applied, options, truncate=model.get("truncate"), progress=bars.show)
        for options in each
    ]


def options_of(verifying: VerifyOptions, drafting: Given) -> list[VerifySettings]:
    """Return the options of the verification, or of one for each defect."""
    own, name = declared_in(VerifySettings, verifying), verifying.get("self_test")
    rule = drafting.get("acceptance")
    if name != ALL and name not in (None, *DEFECTS):
        problem = "which is no defect to plant"
        remedy = f"give {', '.join(DEFECTS)} or {ALL}, and prompts before the option"
        raise ConfigError(problem, option="self_test", value=name, remedy=remedy)
    planted = [name]
    if name == ALL:
        planted = [defect for defect, kind in DEFECTS.items() if rule in (None, kind.rule) or not kind.rule]
    return [VerifySettings(**own, acceptance=rule, self_test=each) for each in planted]
