"""`foredraft verify`: check on the user's machine that speculative decoding does not change the output.

The exit code is 0 if every check passed, 1 if one failed, and 3 if none failed but the evidence is weak. With
--self-test a defect is planted: the code is 1 if the tests found it, and 3 if they did not. `--self-test all`
plants one defect after the other, and the code is 1 if the tests found every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from foredraft.cli.drafting import check_drafting_options, drafter_name, refuse_lossy
from foredraft.cli.errors import print_error
from foredraft.cli.exit_codes import FAILED, INCONCLUSIVE
from foredraft.cli.measuring import PromptOptions, VerifyOptions
from foredraft.cli.options import NONE, DocumentOptions, DraftOptions, Given, ModelOptions, load_options
from foredraft.cli.output_files import check_places, write_report
from foredraft.cli.progress import started
from foredraft.cli.prompts import read_prompts
from foredraft.cli.verification_text import Names, defect_name, lines
from foredraft.errors import ConfigError
from foredraft.verify import VerifySettings
from foredraft.verify.defects import ALL, DEFECTS
from foredraft.verify.verify_settings import no_drafter

if TYPE_CHECKING:
    from foredraft.model.prompt_form import PromptForm
    from foredraft.model.tokenizer import Tokenizer
    from foredraft.verify import VerifyReport
    from foredraft.verify.verify_report import Verdict

__all__ = ["verify"]

EXIT_CODES = {"passed": 0, "failed": FAILED, "inconclusive": INCONCLUSIVE}


def verify(
    *texts: str,
    verifying: VerifyOptions = VerifyOptions(),
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
    check_places(out=output.out, html=verifying.html)
    if drafter_name(drafting, model) == "none":
        raise no_drafter()
    form = prompting.form
    prompts = read_prompts(texts, verifying.prompts, model.get("model"))
    reports = run(prompts, form, options_of(verifying, drafting), model, drafting)
    names: Names = {
        "model": model.get("model", "demo"),
        "draft": drafting.get("draft", None if "model" in model else "demo"),
    }
    documents = [report.as_dict() for report in reports]
    for document in documents:
        document["about"] = names | {"chat": form.chat, "system_message": form.system} | document["about"]
    several = {"verdict": overall(reports), "self_tests": documents}
    with suppress(BrokenPipeError):  # the exit code is the verdict, even if the reader closed the pipe
        write_report(
            several if verifying.self_test == ALL else documents[0],
            lambda width: [line for report in reports for line in lines(report, names, width)],
            output,
            html=verifying.html,
            page=lambda: page(reports, names),
        )
    for report in reports:
        if report.planted is not None and not report.found_planted:
            print_error(f"the planted defect ({defect_name(report)}) was NOT found")
    return EXIT_CODES[overall(reports)]


def page(reports: Sequence[VerifyReport], names: Names) -> str:
    """Return the --html page."""
    from foredraft.pages.verification import verification_page

    return verification_page(reports, names)


def overall(reports: Sequence[VerifyReport]) -> Verdict:
    """Return the verdict of one report, or of the self-tests with every defect."""
    verdicts = {report.verdict for report in reports}
    return verdicts.pop() if len(verdicts) == 1 else "inconclusive"


def run(
    prompts: list[str], form: PromptForm, each: Sequence[VerifySettings], model: Given, drafting: Given
) -> list[VerifyReport]:
    """Load the models with room for the verification, and run it with each of the options."""
    bars = started()
    from foredraft.loading import load_for
    from foredraft.verify import verify as run_checks
    from foredraft.verify.sampler import BATCH
    from foredraft.verify.verify_run import max_new_tokens

    def needs(tokenizer: Tokenizer | None, defaults: object) -> tuple[int, int]:
        longest = 0 if tokenizer is None else form.longest(tokenizer, prompts)
        return BATCH, longest + max_new_tokens(each[0])

    def show_loading(stage: str, done: int, total: int) -> None:
        if stage != "prefill":  # it would flicker between the checks' own stages
            bars.show(stage, done, total)

    try:
        llm = load_for(needs, model.get("model"), **load_options(model, drafting), progress=show_loading)
        applied = form.applied(llm.tokenizer, prompts)
        return [
            run_checks(llm, applied, options, truncate=model.get("truncate"), progress=bars.show)
            for options in each
        ]
    finally:
        bars.clear()


def options_of(verifying: VerifyOptions, drafting: Given) -> list[VerifySettings]:
    """Return the options of the verification, or of one for each defect.

    Raises:
        ConfigError: An option has a wrong value.
    """
    given, name = asdict(verifying), verifying.self_test
    own = {option: given[option] for option in ("tokens", "samples", "detect", "seed")}
    rule = drafting.get("acceptance")
    if name != ALL and name not in (None, *DEFECTS):
        raise ConfigError(
            "which is no defect to plant",
            option="self_test",
            value=name,
            remedy=f"give {', '.join(DEFECTS)} or {ALL}, and prompts before the option",
        )
    planted = [name]
    if name == ALL:
        planted = [defect for defect, kind in DEFECTS.items() if rule in (None, kind.rule) or not kind.rule]
    return [VerifySettings(**own, acceptance=rule, self_test=each) for each in planted]
