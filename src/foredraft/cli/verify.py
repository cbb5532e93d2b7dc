"""`foredraft verify`: check on the user's machine that speculative decoding does not change the output.

The exit code is 0 if every check passed, 1 if one failed, and 3 if none failed but the evidence is weak. With
--self-test a defect is planted: the code is 1 if the tests found it, and 3 if they did not.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.bench.workload import prompt_of
from foredraft.cli.errors import print_error
from foredraft.cli.exit_codes import FAILED, INCONCLUSIVE
from foredraft.cli.generate import check_drafting_options, drafter_name, read_prompt, refuse_lossy
from foredraft.cli.layout import table
from foredraft.cli.measuring import VerifyOptions
from foredraft.cli.options import DocumentOptions, DraftOptions, ModelOptions, OutputOptions, load_options
from foredraft.cli.output_files import check_places, write_report
from foredraft.cli.progress import started
from foredraft.errors import ConfigError, Option
from foredraft.kinds import DRAFTERS
from foredraft.verify import Options
from foredraft.verify.options import no_drafter

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer
    from foredraft.verify import DistributionTest, Divergence, Report

__all__ = ["read_prompts", "verify"]

EXIT_CODES = {"passed": 0, "failed": FAILED, "inconclusive": INCONCLUSIVE}
Names = dict[str, str | None]  # "model" and "draft" -> what the user gave for them


def verify(
    *texts: str,
    verifying: VerifyOptions = VerifyOptions(),
    model: ModelOptions = ModelOptions(),
    drafting: DraftOptions = DraftOptions(),
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Verify that the drafter does not change the output.

    At temperature 0, the new tokens must be identical to plain decoding's, one prompt at a time and in a
    batch. Above temperature 0, chi-square tests compare samples of three tokens with the target's exact joint
    distribution, and the report states which difference they detect.

    Parameters
    ----------
    texts
        Prompts to continue; - reads one from stdin.
    """
    check_drafting_options(model, drafting, OutputOptions())
    refuse_lossy(drafting)
    check_places(out=output.out)
    if drafter_name(drafting, model) == "none":
        raise no_drafter()
    prompts = read_prompts(texts, verifying.prompts, model.model)
    report = run(prompts, options_of(verifying, drafting), model, drafting)
    names: Names = {
        "model": model.model or "demo",
        "draft": drafting.draft or ("demo" if not model.model else None),
    }
    document = report.as_dict()
    document["about"] = names | document["about"]
    with suppress(BrokenPipeError):  # the exit code is the verdict, even if the reader closed the pipe
        write_report(document, lambda width: lines(report, names, width), output)
    if report.planted is not None and not report.found_planted:
        print_error(f"the planted defect ({report.planted}) was NOT found")
    return EXIT_CODES[report.verdict]


def run(prompts: list[str], options: Options, model: ModelOptions, drafting: DraftOptions) -> Report:
    """Load the models with room for the verification, and run it."""
    bars = started()
    from foredraft.loading import load_for
    from foredraft.verify import verify as run_checks
    from foredraft.verify.distribution_tests import BATCH
    from foredraft.verify.run import max_new_tokens

    def needs(tokenizer: Tokenizer | None, defaults: object) -> tuple[int, int]:
        lengths = [] if tokenizer is None else [len(tokenizer.encode(prompt)) for prompt in prompts]
        return BATCH, max(lengths, default=0) + max_new_tokens(options)

    def show_loading(stage: str, done: int, total: int) -> None:
        if stage != "prefill":  # it would flicker between the checks' own stages
            bars.show(stage, done, total)

    try:
        # The default policy would be free not to draft at all; "fixed" always drafts.
        load = {"policy": "fixed"} | load_options(model, drafting)
        llm = load_for(needs, model.model, **load, progress=show_loading)
        return run_checks(llm, prompts, options, truncate=model.truncate, progress=bars.show)
    finally:
        bars.clear()


def options_of(verifying: VerifyOptions, drafting: DraftOptions) -> Options:
    """Return the options of the verification.

    Raises:
        ConfigError: An option has a wrong value.
    """
    given = asdict(verifying)
    own = {name: given[name] for name in ("tokens", "samples", "detect", "seed", "self_test")}
    return Options(**own, acceptance=drafting.acceptance)  # type: ignore[arg-type]  # Options checks the name


def read_prompts(texts: tuple[str, ...], file: str | None, model: str | None) -> list[str]:
    """Return the prompts of the command line or the file, or else the demo's.

    Args:
        texts: Prompts given as arguments.
        file: The --prompts option.
        model: The --model option.

    Raises:
        ConfigError: Prompts are given twice, or the file cannot be read or has no prompts.
    """
    if texts and file is not None:
        raise ConfigError(
            ("prompts are given as arguments and by ", Option("prompts")), remedy="leave one out"
        )
    if texts:
        return [read_prompt(text, model) for text in texts]
    if file is None:
        from foredraft import demo

        return demo.prompts()
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"which cannot be read ({error.strerror})",
            option="prompts",
            value=file,
            remedy="give a text file",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"which is not UTF-8 text (byte {error.start})",
            option="prompts",
            value=file,
            remedy="convert it first",
        ) from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError("which has no prompts", option="prompts", value=file, remedy="give one per line")
    if not file.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [prompt_of(line, f"line {number} of {file}") for number, line in numbered]


# --- the report as text -----------------------------------------------------------------------------

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


def lines(report: Report, names: Names, width: int | None = None) -> list[str]:
    """Return the report as sentences and a table, at most `width` characters wide."""
    return [
        header(report, names),
        "",
        *identity_lines(report),
        "",
        *test_lines(report, width),
        "",
        power(report),
        "Not covered: differences within a cell, other prompts and sampling settings, and longer samples.",
        *[f"Weak evidence: {doubt}." for doubt in report.doubts],
        conclusion(report),
    ]


def header(report: Report, names: Names) -> str:
    """Return one line on what was tested, and on which machine."""
    about = report.about
    draft = f" ({names['draft']})" if names["draft"] and DRAFTERS[about["drafter"]].needs_draft else ""
    draft = f" ({about['plan']})" if about["plan"] else draft
    return (
        f"Target {names['model']}, {about['dtype']} on {about['device']}"
        f"{'' if about['deterministic'] else ', not deterministic'}; drafter {about['drafter']}{draft}"
        f"{', greedy' if about['greedy_drafts'] else ''}, policy {about['policy']}; up to"
        f" {about['max_batch']} sequences in a batch; {about['threads']} threads; foredraft"
        f" {about['foredraft']}, PyTorch {about['torch']}, Python {about['python']}, {about['system']}"
    )


def identity_lines(report: Report) -> list[str]:
    """Return the results at temperature 0."""
    identity = report.identity
    found = [
        "New tokens at temperature 0, compared with plain decoding of one prompt at a time:"
        f" {identity.prompts} prompts, {identity.tokens} tokens"
    ]
    for name, batched in identity.runs:
        same = identity.prompts - identity.diverged(name, batched)
        found.append(f"  {name}, {mode(batched)}: {same} of {identity.prompts} identical")
    found += [f"  {divergence_line(divergence)}" for divergence in identity.divergences]
    return found + [f"  failed: {error}" for error in identity.errors]


def mode(batched: bool) -> str:
    """Return how a run decoded its prompts."""
    return "in a batch" if batched else "one at a time"


def divergence_line(found: Divergence) -> str:
    """Return one line on a divergence, with the target's margin there."""

    def name(token: int | None) -> str:
        return "the end" if token is None else f"token {token}"

    return (
        f"prompt {found.prompt}, {found.drafter}, {mode(found.batched)}, new token {found.position}:"
        f" {name(found.found)} instead of {name(found.expected)}; the target's two most likely tokens there"
        f" are {found.best[0]} (logit {found.logits[0]:.6g}) and {found.best[1]} (logit"
        f" {found.logits[1]:.6g}), margin {found.margin:.3g}"
    )


def test_lines(report: Report, width: int | None) -> list[str]:
    """Return the chi-square tests as a table, at most `width` characters wide."""
    first = report.tests[0]
    room = None if width is None else width - 2
    return [
        f"Chi-square tests of the joint distribution of {first.positions} sampled tokens against the target's"
        f" exact one: {len(report.tests)} tests, each at level {first.level:.2g} ({report.family_level:g}"
        f" together), seed {report.seed}",
        *[f"  {line}" for line in table([COLUMNS, *map(row, report.tests)], room, keys=4)],
        *[f"  failed: {error}" for test in report.tests for error in test.errors],
    ]


def row(test: DistributionTest) -> tuple[str, ...]:
    """Return a test's cells of the table."""
    settings = [f"T={test.temperature:g}"]
    settings += [f"k={test.top_k}"] if test.top_k else []
    settings += [f"p={test.top_p:g}"] if test.top_p < 1 else []
    failure = f"{test.impossible} impossible" if test.impossible else "FAILED"
    return (
        str(test.prompt),
        "none (control)" if test.control else test.drafter,
        test.acceptance,
        " ".join(settings),
        str(test.samples),
        str(test.cells),
        f"{test.statistic:.2f}",
        f"{test.p_value:.2g}",
        f"{test.detectable:.4f}",
        f"{test.accepted / test.drafted:.0%}" if test.drafted else "-",
        "ok" if test.passed else failure,
    )


def power(report: Report) -> str:
    """Return one line on the difference that the tests detect."""
    return (
        f"Every test of the drafter fails with probability {report.power:g} or more if the total variation"
        f" distance between the output's and the target's distribution over its cells is"
        f" {report.detectable:.4f} or more."
    )


def conclusion(report: Report) -> str:
    """Return one line on the outcome."""
    if report.planted is not None:
        found = "was found" if report.found_planted else "was NOT found: these tests prove nothing here"
        return f"SELF-TEST: the planted defect ({report.planted}) {found}."
    return {
        "passed": "PASSED: no difference from plain decoding was found.",
        "failed": "FAILED: the output differs from plain decoding's, or a request failed.",
        "inconclusive": "INCONCLUSIVE: no difference was found, but one could have been missed.",
    }[report.verdict]
