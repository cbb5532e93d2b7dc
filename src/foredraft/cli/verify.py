"""`foredraft verify`: proof, on the user's own machine, that speculation changed nothing.

Contract: the exit code is 0 when everything passed, 1 when something failed, 3 when nothing failed but a
difference worth finding could have been missed. With --self-test a defect is planted: 1 says that it was
found, 3 that it was not.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.bench.workload import prompt_of
from foredraft.cli.generate import check, named, read_prompt, refuse_lossy
from foredraft.cli.measuring import VerifyOptions
from foredraft.cli.options import DraftOptions, ModelOptions, OutputOptions, loading
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import table
from foredraft.errors import ConfigError
from foredraft.kinds import DRAFTERS
from foredraft.verify import Options

if TYPE_CHECKING:
    from foredraft.model.tokenizer import Tokenizer
    from foredraft.verify import Divergence, LawTest, Report

__all__ = ["verify"]

EXIT = {"passed": 0, "failed": 1, "inconclusive": 3}
MODEL, DRAFTING = ModelOptions(), DraftOptions()


def verify(
    *texts: str,
    verifying: VerifyOptions = VerifyOptions(),
    model: ModelOptions = MODEL,
    drafting: DraftOptions = DRAFTING,
) -> int:
    """Verify that the output did not change: the same tokens at temperature 0, the same law otherwise.

    Compares with plain decoding of the same target, token by token, alone and in a batch; then tests samples
    of several tokens against the target's exact joint law by chi-square, and says what difference it would
    have found.

    Parameters
    ----------
    texts
        Prompts to go on from; - reads one from stdin.
    """
    check(model, drafting, OutputOptions())
    refuse_lossy(drafting)
    name = named(drafting, model)
    if name == "none":
        raise ConfigError("nothing drafts, so there is nothing to verify; give --draft, or --drafter lookup")
    prompts = read_prompts(texts, verifying.prompts, model.model)
    from foredraft.verify import verify as run
    from foredraft.verify.joint import SIBLINGS
    from foredraft.verify.run import room

    asked = asdict(verifying)
    wanted = {key: asked[key] for key in ("tokens", "samples", "detect", "seed", "self_test")}
    options = Options(**wanted, rule=drafting.acceptance)  # type: ignore[arg-type]  # checked there
    bars = ProgressBars()
    try:
        import foredraft

        llm = foredraft.load(
            model.model,
            **{"policy": "fixed"} | loading(model, drafting),  # a cost model might never draft
            needs=lambda tokenizer, defaults: (SIBLINGS, longest(prompts, tokenizer) + room(options)),
            progress=lambda stage, done, total: bars.show(stage, done, total) if stage == "load" else None,
        )
        report = run(llm, prompts, options, truncate=model.truncate, progress=bars.show)
    finally:
        bars.clear()
    names = {"model": model.model or "demo", "draft": drafting.draft or ("demo" if not model.model else None)}
    if verifying.json:
        document = report.as_dict()
        document["about"] = names | document["about"]
        shown = json.dumps(document, allow_nan=False)
    else:
        shown = "\n".join(lines(report, names))
    with suppress(BrokenPipeError):  # the verdict is the exit code, whoever stopped reading
        print(shown)
    if report.planted is not None and not report.found_planted:
        print(f"foredraft: error: the planted defect ({report.planted}) was NOT found", file=sys.stderr)
    return EXIT[report.verdict]


def longest(prompts: list[str], tokenizer: Tokenizer | None) -> int:
    return 0 if tokenizer is None else max(len(tokenizer.encode(prompt)) for prompt in prompts)


def read_prompts(texts: tuple[str, ...], file: str | None, model: str | None) -> list[str]:
    """Those given, of the file or of the command line; else the demo's."""
    if texts and file is not None:
        raise ConfigError(f"prompts come as arguments and from --prompts {file}; leave one out")
    if texts:
        return [read_prompt(text, model) for text in texts]
    if file is None:
        from foredraft import demo

        return demo.prompts()
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompts {file} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {file} holds no prompts; give one a line")
    if not file.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [prompt_of(line, f"line {number} of {file}") for number, line in numbered]


# --- what a person sees -----------------------------------------------------------------------------

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


def lines(report: Report, names: dict[str, str | None]) -> list[str]:
    """The report as a person reads it."""
    identity = report.identity
    shown = [tested(report, names), ""]
    shown.append(
        f"Tokens at temperature 0 against plain decoding one by one: {identity.prompts} prompts,"
        f" {identity.tokens} tokens"
    )
    for name, batched in identity.runs:
        same = identity.prompts - identity.diverged(name, batched)
        shown.append(
            f"  {name}, {'batched' if batched else 'one by one'}: {same} of {identity.prompts} identical"
        )
    shown += [f"  {diverged(divergence)}" for divergence in identity.divergences]
    shown += [f"  failed: {error}" for error in identity.errors]
    positions = report.tests[0].positions
    shown += [
        "",
        f"Law of {positions} sampled tokens against the target's exact one: {len(report.tests)} tests, each"
        f" at level {report.tests[0].level:.2g} ({report.family_level:g} together), seed {report.seed}",
    ]
    shown += [f"  {line}" for line in table([COLUMNS, *map(row, report.tests)])]
    shown += [f"  failed: {error}" for test in report.tests for error in test.errors]
    shown += ["", powered(report), *[f"In doubt: {doubt}." for doubt in report.doubts], conclusion(report)]
    return shown


def tested(report: Report, names: dict[str, str | None]) -> str:
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


def diverged(found: Divergence) -> str:
    def named(token: int | None) -> str:
        return "the end" if token is None else f"token {token}"

    return (
        f"prompt {found.prompt}, {found.drafter}, {'batched' if found.batched else 'one by one'}, new token"
        f" {found.position}: {named(found.found)} instead of {named(found.expected)}; the target's two best"
        f" there are {found.best[0]} ({found.logits[0]:.6g}) and {found.best[1]} ({found.logits[1]:.6g}),"
        f" {found.margin:.3g} apart"
    )


def row(test: LawTest) -> tuple[str, ...]:
    cuts = [f"T={test.temperature:g}"]
    cuts += [f"k={test.top_k}"] if test.top_k else []
    cuts += [f"p={test.top_p:g}"] if test.top_p < 1 else []
    rejected = f"{test.impossible} impossible" if test.impossible else "FAILED"
    return (
        str(test.prompt),
        "none (control)" if test.control else test.drafter,
        test.acceptance,
        " ".join(cuts),
        str(test.samples),
        str(test.cells),
        f"{test.statistic:.2f}",
        f"{test.p_value:.2g}",
        f"{test.detectable:.4f}",
        f"{test.accepted / test.drafted:.0%}" if test.drafted else "-",
        "ok" if test.passed else rejected,
    )


def powered(report: Report) -> str:
    return (
        f"A law of these cells at a total variation of {report.detectable:.4f} from the target's, in whatever"
        f" direction, fails each of the drafter's tests with probability {report.power:g} or more."
    )


def conclusion(report: Report) -> str:
    if report.planted is not None:
        found = "was found" if report.found_planted else "was NOT found: these tests prove nothing here"
        return f"SELF-TEST: the planted defect ({report.planted}) {found}."
    return {
        "passed": "PASSED: no difference from plain decoding was found.",
        "failed": "FAILED: the output differs from plain decoding's.",
        "inconclusive": "INCONCLUSIVE: no difference was found, but one could have been missed.",
    }[report.verdict]
