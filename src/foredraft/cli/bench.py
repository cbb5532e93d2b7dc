"""`foredraft bench`: time every decoding method on this model, these prompts and this machine.

stdout has tables, or with --json one JSON document. The exit code is 0, or 1 if tokens differ from plain
decoding's although they must not. After Ctrl-C, the finished rows are shown and the code is 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.cli.drafting import refuse_lossy
from foredraft.cli.errors import as_flag, one_line
from foredraft.cli.exit_codes import FAILED, INTERRUPTED
from foredraft.cli.interrupt import Raised
from foredraft.cli.layout import table, with_weights
from foredraft.cli.measuring import BenchOptions, PromptOptions
from foredraft.cli.options import NONE, DocumentOptions, DraftingOptions, Given, ModelOptions, load_options
from foredraft.cli.output_files import check_places, write_report
from foredraft.cli.progress import started
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.bench.bench_records import BenchReport, Exactness, Row, Spread
    from foredraft.bench.bench_settings import BenchSettings

__all__ = ["bench"]


def bench(
    *,
    benchmark: BenchOptions = BenchOptions(),
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
    check_places(out=output.out, html=benchmark.html)
    from foredraft.bench.workload import load_workloads

    workloads = load_workloads(listed(benchmark.workload), benchmark.prompts)
    bars = started()
    try:
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
    finally:
        bars.clear()
    for note in report.notes:
        print(f"foredraft: {one_line(note)}", file=sys.stderr)
    write_report(
        report.as_dict(), lambda width: lines(report, width), output,
        html=benchmark.html, page=lambda: page(report),
    )  # fmt: skip
    if not report.finished:
        print("foredraft: interrupted; the rows above were done", file=sys.stderr)
        return INTERRUPTED
    return FAILED if differing(report) else 0


def page(report: BenchReport) -> str:
    """Return the --html page."""
    from foredraft.pages.benchmark import benchmark_page

    return benchmark_page(report)


def options_of(benchmark: BenchOptions, drafting: Given) -> BenchSettings:
    """Return the options of the benchmark.

    Raises:
        ConfigError: An option has a wrong value.
    """
    from foredraft.bench.bench_settings import BenchSettings

    refuse_lossy(drafting)
    if benchmark.prompts is not None and benchmark.prompts < 1:
        raise ConfigError(option="prompts", value=benchmark.prompts, remedy="give 1 or more")
    try:
        batch = tuple(map(int, listed(benchmark.batch)))
    except ValueError:
        raise ConfigError(
            option="batch", value=benchmark.batch, remedy="give whole numbers, as in 1,8"
        ) from None
    return BenchSettings(
        methods=None if benchmark.methods is None else listed(benchmark.methods),
        policies=() if benchmark.policies is None else listed(benchmark.policies),
        new_tokens=benchmark.new_tokens,
        repeats=benchmark.repeats,
        batch=batch,
        temperature=benchmark.temperature,
        acceptance=drafting.get("acceptance") or "speculative",
    )


def listed(words: str) -> tuple[str, ...]:
    """Split at commas, and strip the spaces around each word."""
    return tuple(word.strip() for word in words.split(","))


def differing(report: BenchReport) -> list[Row]:
    """Return Foredraft's rows whose tokens differ from plain decoding's although they must not."""
    if not report.options["deterministic"]:
        return []
    return [row for row in report.rows if row.exactness and not row.peer and row.exactness.holds is False]


# --- tables -----------------------------------------------------------------------------------------

METHODS = (
    "workload",
    "batch",
    "method",
    "tokens/s",
    "over plain",
    "quartiles",
    "others",
    "predicted",
    "÷ predicted",
    "alpha",
    "tau",
    "ceiling",
    "perfect",
    "o",
    "identical",
    "repeats",
    "prompts",
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
    """Return one line on the model, the options and the machine."""
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


def cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Return a row's cells in these columns; a row that could not run has its note under tokens/s."""
    drafts, exact = row.drafting, row.exactness
    if exact is None:
        known = {"workload": row.workload, "batch": str(row.batch), "method": row.contender}
        return tuple((known | {"tokens/s": row.note or ""}).get(column, "") for column in columns)
    texts = {
        "workload": row.workload,
        "batch": str(row.batch),
        "method": row.contender,
        "policy": row.policy or "",
        "tokens/s": median(row.tokens_per_second, ".1f"),
        "over plain": median(row.speedup, ".2f"),
        "quartiles": "" if row.speedup is None else f"{row.speedup.lower:.2f}-{row.speedup.upper:.2f}",
        "others": median(row.others, ".2f"),
        "predicted": median(row.predicted, ".2f"),
        "÷ predicted": median(row.measured_over_predicted, ".2f"),
        "alpha": "" if drafts is None or drafts.alpha is None else f"{drafts.alpha:.2f}",
        "tau": "" if drafts is None else f"{drafts.mean_accepted_length:.2f}",
        "drafted": "" if drafts is None else f"{drafts.mean_draft_length:.2f}",
        "ceiling": "" if row.ceiling is None else f"{row.ceiling.speedup:.2f}",
        "perfect": "" if row.perfect is None else f"{row.perfect.speedup:.2f}",
        "o": median(row.overhead, ".2f"),
        "identical": "lossy" if not row.lossless else identical(exact),
        "repeats": median(row.repeated, ".0%"),
        "prompts": f"{row.counted} of {row.prompts}",
    }
    return tuple(texts[column] for column in columns)


def identical(exact: Exactness) -> str:
    """Return how many prompts gave plain decoding's tokens."""
    return f"{exact.identical} of {exact.prompts}" if exact.comparable else "not comparable"


def over_peers(row: Row) -> str:
    """Return one line on the row's speed relative to other programs."""
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


def median(spread: Spread | None, form: str) -> str:
    """Return the formatted median, or "-" if there is none."""
    return "-" if spread is None else format(spread.median, form)
