"""`foredraft bench` and `foredraft tune`: time decoding methods; search the sub-layers that a draft leaves
out.

The exit code is 1 if tokens differ from plain decoding's although they must not, and 130 after Ctrl-C,
when the finished rows are shown, or the study keeps its trials. A winning plan that cannot be written is
code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cyclopts import Group, Token

from foredraft.bench.contenders import ALL, CONTENDERS
from foredraft.bench.settings import BenchSettings, TuneSettings
from foredraft.cli.interrupt import FAILED, INTERRUPTED, Raised
from foredraft.cli.options import (
    HTML,
    DocumentOptions,
    DraftingOptions,
    ModelOptions,
    PromptOptions,
    bullets,
    load_options,
    refuse_lossy,
)
from foredraft.cli.prompts import read_prompts
from foredraft.cli.render import started
from foredraft.cli.sections import NONE, Given, declared_in, measured, option, section
from foredraft.cli.words import (
    as_flag,
    check_places,
    one_line,
    table,
    with_weights,
    write_report,
)
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.bench_records import BenchReport, Row
    from foredraft.tune.tune_records import TuneReport


WORKLOAD, PROMPTS, BATCH = "all", 8, "1"  # what `bench` takes by default


def parse_whole(_: type, words: Sequence[Token]) -> int:
    """Parse a whole number, and refuse a fraction instead of rounding it; `2.0` counts as whole."""
    word = words[0].value
    with suppress(ValueError):
        if "." not in word:
            return int(word)
        if float(word).is_integer():
            return int(float(word))
    raise ValueError(f"{word!r} is not a whole number")


CONTENDER_HELP = bullets({name: kind.summary for name, kind in CONTENDERS.items()})
BENCH = {
    "methods": option(
        str,
        "Methods to time, separated by commas; plain is always timed.\n\n"
        f"{CONTENDER_HELP}\nDefault, or with all: every lossless method that can run.",
    ),
    "policies": option(
        str,
        "Also time the drafters under these policies, separated by commas, or under all; the report then has"
        " a table by policy. --policy-option applies to --policy only.",
    ),
    "workload": option(
        str,
        'Names or files, separated by commas. A file has a "prompt" in every line of JSON; all stands for the'
        f" workloads that ship with Foredraft. [default: {WORKLOAD}]",
    ),
    "prompts": option(
        int, f"Maximum number of prompts per workload, evenly spaced over it. [default: {PROMPTS}]"
    ),
    **measured(BenchSettings, "new_tokens", "repeats"),
    "batch": option(str, f"Batch sizes, separated by commas. [default: {BATCH}]"),
    **measured(BenchSettings, "temperature"),
    **HTML,
}
TUNE = {
    "prompts": option(
        str,
        'File of prompts: one per line, or .jsonl with a "prompt" in every line; a quarter of them is held'
        " out. Required with --model; the demo model's prompts ship with Foredraft.",
    ),
    **measured(TuneSettings, whole=parse_whole),
    "plan_out": option(
        Path,
        "Also write the plan to this file if it wins; generate, bench and verify find it in the cache"
        " folder.",
    ),
    **HTML,
}

if TYPE_CHECKING:
    BenchOptions: TypeAlias = Given
    TuneOptions: TypeAlias = Given
else:
    BenchOptions = section(
        "BenchOptions", Group("Benchmark", sort_key=3), BENCH,
        ["methods", "workload", "prompts", "batch", "temperature", "html"],
    )  # fmt: skip
    TuneOptions = section(
        "TuneOptions", Group("Search", sort_key=2), TUNE,
        ["prompts", "trials", "timeout", "temperature", "html"],
    )  # fmt: skip


def bench(
    *,
    benchmark: BenchOptions = NONE,
    model: ModelOptions = NONE,
    drafting: DraftingOptions = NONE,
    prompting: PromptOptions = PromptOptions(),
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Time decoding methods and other programs on the same prompts, and report which outputs are identical.

    The methods take turns on every prompt, after a warm-up, with the same weights, dtype, threads and number
    of tokens. A ratio is the median of the ratios within the turns. Prompts whose plain output repeats itself
    do not count.
    """
    options, form = options_of(benchmark, drafting), prompting.form
    html = benchmark.get("html")
    check_places(out=output.out, html=html)
    from foredraft.bench.workload import load_workloads

    workloads = load_workloads(listed(benchmark.get("workload", WORKLOAD)), benchmark.get("prompts", PROMPTS))
    with started() as bars:
        from foredraft.bench.bench_run import bench as run

        with Raised():
            report = run(
                workloads,
                options,
                model=model.get("model"),
                truncate=model.get("truncate"),
                form=form,
                progress=bars.show,
                spelling=as_flag,
                **load_options(model, drafting),
            )
    for note in report.notes:
        print(f"foredraft: {one_line(note)}", file=sys.stderr)
    from foredraft.pages.benchmark import benchmark_page

    write_report(
        report.as_dict(), lambda width: lines(report, width), output,
        html=html, page=lambda: benchmark_page(report),
    )  # fmt: skip
    if not report.finished:
        print("foredraft: interrupted; the rows above were done", file=sys.stderr)
        return INTERRUPTED
    return FAILED if differing(report) else 0


def options_of(benchmark: BenchOptions, drafting: Given) -> BenchSettings:

    refuse_lossy(drafting)
    if (prompts := benchmark.get("prompts", PROMPTS)) < 1:
        raise ConfigError(option="prompts", value=prompts, remedy="give 1 or more")
    sizes = benchmark.get("batch", BATCH)
    try:
        batch = tuple(map(int, listed(sizes)))
    except ValueError:
        raise ConfigError(option="batch", value=sizes, remedy="give whole numbers, as in 1,8") from None
    lists: dict[str, Any] = {
        name: listed(benchmark[name]) for name in ("methods", "policies") if name in benchmark
    }
    rule: Any = drafting.get("acceptance") or "speculative"
    return BenchSettings(**declared_in(BenchSettings, benchmark), **lists, batch=batch, acceptance=rule)


def listed(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(","))


def differing(report: BenchReport) -> list[Row]:
    """Return Foredraft's rows whose tokens differ from plain decoding's although they must not."""
    if not report.options["deterministic"]:
        return []
    return [row for row in report.rows if row.exactness and not row.peer and row.exactness.holds is False]


METHODS = (
    *("workload", "batch", "method", "tokens/s", "over plain", "quartiles", "others", "predicted"),
    *("÷ predicted", "alpha", "tau", "ceiling", "perfect", "o", "identical", "repeats", "prompts"),
)
BY_POLICY = (*METHODS[:3], "policy", *METHODS[3:11], "drafted", "ceiling", "identical")


def lines(report: BenchReport, width: int | None = None) -> list[str]:
    """Return the report as tables, at most `width` characters wide, and sentences."""
    shown = [*(f"WARNING: {doubt}" for doubt in report.doubts), about(report), ""]
    shown += table([METHODS, *(cells(row, METHODS) for row in report.methods)], width, keys=3)
    if report.policies:
        shown += ["", *table([BY_POLICY, *(cells(row, BY_POLICY) for row in report.policies)], width, keys=4)]
    shown += ["", *(over_peers(row) for row in report.methods if row.over_peers and not row.peer)]
    shown.append(
        f"A prompt counts where plain decoding repeats under {report.options['max_repeated']:.0%} of its"
        " 4-grams. identical: prompts whose tokens were plain decoding's in every run."
        + ("" if not report.lossy else " lossy: the text is not the model's own.")
    )
    shown += filter(None, (likelihoods(report, row) for row in report.methods))
    shown += filter(None, (report.turns_remark, report.bandwidth_remark))
    shown += [
        f"{report.name(row)} on {row.workload}, batch {row.batch}: the tokens DIFFER from plain decoding's"
        for row in differing(report)
    ]
    return shown


def about(report: BenchReport) -> str:
    target, costs, speed = report.models[0], report.typical_costs[0], report.bandwidth
    options, machine = report.options, report.machine
    step = f"a bare step takes {costs.step_seconds * 1e3:.2f} ms"
    if speed is not None and costs.bandwidth_share is not None:
        best = f"{speed.bytes_per_second / 1e9:.1f} GB/s ({speed.method})"
        step += f" and reads its weights at {costs.bandwidth_share:.0%} of {best}"
    if costs.others is not None:
        step += f", beside others that used {costs.others.median:.2f} CPUs"
    return (
        f"{options['model']}, {target.parameters / 1e6:.0f} M parameters,"
        f" {with_weights(target.dtype, target.weights)}; temperature"
        f" {options['temperature']:g}, {options['new_tokens']} tokens, {options['repeats']} repeats;"
        f" {machine['cpu']}, {machine['threads']} threads, PyTorch {machine['torch']}; {step}"
    )


# Columns that have another name on the page, and those whose missing figures are blank.
ON_PAGE = {
    "others": "others, CPUs", "÷ predicted": "measured ÷ predicted", "alpha": "α", "tau": "τ",
    "drafted": "draft length", "perfect": "ceiling at α = 1", "o": "host overhead o",
    "repeats": "repeated 4-grams", "prompts": "counted prompts",
}  # fmt: skip
BLANK = ("alpha", "tau", "drafted", "ceiling", "perfect")


def cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Return a row's cells in these columns; a row that could not run has its note under tokens/s."""
    from foredraft.pages.benchmark import COLUMNS
    from foredraft.pages.report_page import DASH

    exact, speed = row.exactness, row.speedup
    texts = {"workload": row.workload, "batch": str(row.batch), "method": row.contender}
    if exact is None:
        texts["tokens/s"] = row.note or ""
        return tuple(texts.get(column, "") for column in columns)
    identical = f"{exact.identical} of {exact.prompts}" if exact.comparable else "not comparable"
    texts |= {
        "policy": row.policy or "",
        "quartiles": "" if speed is None else f"{speed.lower:.2f}-{speed.upper:.2f}",
        "identical": identical if row.lossless else "lossy",
    }
    for name in (each for each in columns if each not in texts):
        text = COLUMNS[ON_PAGE.get(name, name)](row).text
        texts[name] = text if text != DASH else "" if name in BLANK else "-"
    return tuple(texts[column] for column in columns)


def over_peers(row: Row) -> str:
    ratios = ", ".join(f"{spread.median:.2f} x {name}" for name, spread in (row.over_peers or {}).items())
    lossy = "" if row.lossless else ", which is lossy,"
    return f"{row.workload}, batch {row.batch}: {row.contender}{lossy} is {ratios}"


def likelihoods(report: BenchReport, row: Row) -> str | None:
    """Return one line on how likely the target finds a row's texts; None where that was not asked for."""
    if row.log_probability is None:
        return None
    found = row.log_probability
    return (
        f"{row.workload}, batch {row.batch}: the target gives a token of {report.name(row)}"
        f" {found.median:.3f} nats ({found.lower:.3f} to {found.upper:.3f} over the texts)"
    )


def tune(
    *,
    tuning: TuneOptions = NONE,
    model: ModelOptions = NONE,
    prompting: PromptOptions = PromptOptions(),
    output: DocumentOptions = DocumentOptions(),
) -> int:
    """Search the layers that this model can leave out while it drafts for itself, and keep the best plan.

    A trial needs no decoding: it is one forward of the draft over texts that the model wrote itself, and
    predicts the draft's speed-up. The best plans are then timed in real decoding of held-out prompts, in
    turns with plain decoding; the plan is kept only if it wins. An interrupted search continues where it
    stopped.
    """
    form, name, file = prompting.form, model.get("model"), tuning.get("prompts")
    options = TuneSettings(**declared_in(TuneSettings, tuning))
    refuse_empty(prompts=file, storage=options.storage, model=name)
    files = {"plan_out": tuning.get("plan_out"), "out": output.out, "html": tuning.get("html")}
    refuse_empty(**files)
    check_places(**files)
    prompts = prompts_of(file, name)
    with started() as bars:
        from foredraft.tune.run import tune as run

        with Raised():
            report = run(
                prompts,
                options,
                model=name,
                plan_out=files["plan_out"],
                truncate=model.get("truncate"),
                form=form,
                progress=bars.show,
                **load_options(model),
            )
    from foredraft.pages.training import tuning_page

    write_report(
        report.as_dict(), lambda width: tune_lines(report, width), output,
        html=files["html"], page=lambda: tuning_page(report),
    )  # fmt: skip
    if report.unwritten:
        raise ConfigError("; ".join(report.unwritten))
    if not report.finished:
        print("foredraft: interrupted; the same command goes on with the study", file=sys.stderr)
        return INTERRUPTED
    return (
        FAILED
        if model.get("deterministic", True) and any(one.identical is False for one in report.finalists)
        else 0
    )


def refuse_empty(**values: str | Path | None) -> None:
    """Refuse empty values, as an unset shell variable gives them."""
    for name, value in values.items():
        if value == "":
            raise ConfigError(option=name, value=value, remedy="give it a value, or leave it out")
        if value == Path():
            raise ConfigError("is '' or '.'", option=name, remedy="give a file in a folder that exists")


def prompts_of(file: str | None, model: str | None) -> list[str]:
    """Return the prompts to tune on: the file's, or for the demo model all that ship with Foredraft."""
    if file is not None:
        return read_prompts((), file, model)
    if model is not None:
        problem = "is required with a model of your own"
        raise ConfigError(problem, option="prompts", remedy="give a file with one prompt per line")
    from foredraft import demo
    from foredraft.bench.workload import load_workloads

    return [*demo.prompts(), *(prompt for each in load_workloads((ALL,)) for prompt in each.prompts)]


COLUMNS = (
    *("plan", "draft", "over plain", "quartiles", "predicted"),
    *("c", "alpha", "tau", "predicted tau", "trial's tau", "identical"),
)


def tune_lines(report: TuneReport, width: int | None = None) -> list[str]:
    """Return the report as a table, at most `width` characters wide, and sentences."""
    best, weights = report.best, report.options.get("draft_weights")
    copy = "" if weights is None else f" of its copy in {weights}"
    shown = [f"WARNING: {doubt}" for doubt in report.doubts]
    shown.append(
        f"{report.model}: {len(report.trials)} trials of {2 * report.layers} sub-layers{copy} on"
        f" {report.tokens} tokens; the best predicts {best.predicted:.2f} x plain decoding at drafts of"
        f" {best.draft}"
    )
    rows = []
    for one in report.finalists:
        quartiles = f"{one.speedup.lower:.2f}-{one.speedup.upper:.2f}"
        identical = {True: "yes", False: "NO", None: "not comparable"}[one.identical]
        speed = (one.skips, str(one.draft), f"{one.speedup.median:.2f}", quartiles)
        rows.append((*speed, *(f"{figure:.2f}" for figure in one.figures), identical))
    shown += ["", *table([COLUMNS, *rows], width, keys=2)] if rows else []
    return [*shown, "", verdict(report), *report.notes]


def verdict(report: TuneReport) -> str:
    if not report.finished:
        return "Interrupted before the best plans were timed to the end; nothing was written."
    if report.winner is None:
        return f"No plan won, and nothing was written. {report.objections}"
    won = report.finalists[report.winner]
    nowhere = "not written" if report.unwritten else "not kept, because the cache folder is turned off"
    written = f"written to {', '.join(report.plan_files)}" if report.plan_files else nowhere
    return (
        f"{won.skips} wins: {won.speedup.median:.2f} x plain decoding on {won.prompts} held-out prompts;"
        f" {written}."
    )
