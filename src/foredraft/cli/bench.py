"""`foredraft bench`: what each method gains on this model, these prompts and this machine.

Contract: the last line of stdout is one JSON document, always; on a terminal a table stands before it. The
exit code is 0, and 1 when tokens differ from plain decoding's that must not. After Ctrl-C the rows that were
done are shown, and the code is 130.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foredraft.bench.records import Exactness, Report, Row, Spread
from foredraft.cli.error_text import spelled_as_options
from foredraft.cli.generate import refuse_lossy
from foredraft.cli.measuring import BenchOptions
from foredraft.cli.options import DraftingOptions, ModelOptions, loading
from foredraft.cli.output_files import check_places
from foredraft.cli.progress import ProgressBars
from foredraft.cli.render import table
from foredraft.errors import ConfigError
from foredraft.files import write_whole

if TYPE_CHECKING:
    from foredraft.bench.options import Options

__all__ = ["bench"]

DIFFERS, INTERRUPTED = 1, 130


def bench(
    *,
    benchmark: BenchOptions = BenchOptions(),
    model: ModelOptions = ModelOptions(),
    drafting: DraftingOptions = DraftingOptions(),
) -> int:
    """Time every method, and other programs, on the same prompts; say what was identical.

    All take turns on every prompt, warm, with the same weights, dtype, threads and number of tokens. A ratio
    is the median of those within the turns; prompts whose output repeats itself do not count.
    """
    options = options_of(benchmark, drafting)
    check_places(json=benchmark.json, html=benchmark.html)
    from foredraft.bench.workload import load_workloads

    workloads = load_workloads(listed(benchmark.workload), benchmark.prompts)
    if benchmark.html is not None:
        from foredraft.bench.report import page  # says now if it cannot draw
    from foredraft.bench.run import bench as run

    bars = ProgressBars()
    try:
        report = run(
            workloads,
            options,
            model=model.model,
            truncate=model.truncate,
            progress=bars.show,
            **loading(model, drafting),
        )
    finally:
        bars.clear()
    for note in report.notes:
        print(f"foredraft: {spelled_as_options(note)}", file=sys.stderr)
    document = json.dumps(report.as_dict(), allow_nan=False)
    try:
        if sys.stdout.isatty():
            print("\n".join([*lines(report), ""]))
        print(document, flush=True)  # first: a disk that is full must not take it away
    except BrokenPipeError:  # the reader has gone: no failure
        raise
    except OSError as error:
        raise ConfigError(f"stdout cannot be written ({error.strerror})") from error
    finally:  # nor may a lost stdout take the files
        if benchmark.json is not None:
            write_whole(benchmark.json, document + "\n", "json")
        if benchmark.html is not None:
            write_whole(benchmark.html, page(report), "html")
    if not report.finished:
        print("foredraft: interrupted; the rows above were done", file=sys.stderr)
        return INTERRUPTED
    return DIFFERS if differing(report) else 0


def options_of(benchmark: BenchOptions, drafting: DraftingOptions) -> Options:
    """Raises ConfigError that names a value that is wrong."""
    from foredraft.bench.options import Options

    refuse_lossy(drafting)
    if benchmark.prompts is not None and benchmark.prompts < 1:
        raise ConfigError(f"--prompts is {benchmark.prompts}; give 1 or more")
    try:
        batch = tuple(map(int, listed(benchmark.batch)))
    except ValueError:
        raise ConfigError(f"--batch is {benchmark.batch!r}; give whole numbers, as in 1,8") from None
    return Options(
        methods=None if benchmark.methods is None else listed(benchmark.methods),
        policies=() if benchmark.policies is None else listed(benchmark.policies),
        new_tokens=benchmark.new_tokens,
        repeats=benchmark.repeats,
        batch=batch,
        temperature=benchmark.temperature,
        coupled=drafting.acceptance == "coupled",
    )


def listed(words: str) -> tuple[str, ...]:
    """What stands between the commas, without the spaces around it."""
    return tuple(word.strip() for word in words.split(","))


def differing(report: Report) -> list[Row]:
    """Rows of ours whose tokens are not plain decoding's though they must be."""
    if not report.options["deterministic"]:
        return []
    return [row for row in report.rows if row.exactness and not row.peer and row.exactness.holds is False]


# --- what a person sees -----------------------------------------------------------------------------

METHODS = (
    "workload",
    "batch",
    "method",
    "tokens/s",
    "over plain",
    "quartiles",
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
BY_POLICY = (*METHODS[:3], "policy", *METHODS[3:10], "drafted", "ceiling", "identical")


def lines(report: Report) -> list[str]:
    """The report as a person reads it."""
    shown = [about(report), ""]
    shown += table([METHODS, *(cells(row, METHODS) for row in report.methods)])
    if report.policies:
        shown += ["", *table([BY_POLICY, *(cells(row, BY_POLICY) for row in report.policies)])]
    shown += ["", *(over_peers(row) for row in report.methods if row.over_peers and not row.peer)]
    shown.append(
        f"A prompt counts where plain decoding repeats under {report.options['max_repeated']:.0%} of its"
        " 4-grams. identical: prompts whose tokens were plain decoding's in every run."
        + ("" if not report.lossy else " lossy: the text is not the model's own.")
    )
    shown += [
        f"{report.name(row)} on {row.workload}, batch {row.batch}: the tokens DIFFER from plain decoding's"
        for row in differing(report)
    ]
    return shown


def about(report: Report) -> str:
    target, costs, speed = report.models[0], report.typical_costs[0], report.bandwidth
    options, machine = report.options, report.machine
    step = f"a bare step takes {costs.step_seconds * 1e3:.2f} ms"
    if speed is not None and costs.bandwidth_share is not None:
        best = f"{speed.bytes_per_second / 1e9:.1f} GB/s ({speed.method})"
        step += f" and reads its weights at {costs.bandwidth_share:.0%} of {best}"
    return (
        f"{options['model']}, {target.parameters / 1e6:.0f} M parameters, {target.dtype}; temperature"
        f" {options['temperature']:g}, {options['new_tokens']} tokens, {options['repeats']} repeats;"
        f" {machine['cpu']}, {machine['threads']} threads, PyTorch {machine['torch']}; {step}"
    )


def cells(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    drafts, exact = row.drafting, row.exactness
    if exact is None:
        head = {"workload": row.workload, "batch": str(row.batch), "method": row.contender}
        return tuple((head | {"tokens/s": row.note or ""}).get(column, "") for column in columns)
    made = {
        "workload": row.workload,
        "batch": str(row.batch),
        "method": row.contender,
        "policy": row.policy or "",
        "tokens/s": shown(row.tokens_per_second, ".1f"),
        "over plain": shown(row.speedup, ".2f"),
        "quartiles": "" if row.speedup is None else f"{row.speedup.lower:.2f}-{row.speedup.upper:.2f}",
        "predicted": shown(row.predicted, ".2f"),
        "÷ predicted": shown(row.measured_over_predicted, ".2f"),
        "alpha": "" if drafts is None or drafts.alpha is None else f"{drafts.alpha:.2f}",
        "tau": "" if drafts is None else f"{drafts.mean_accepted_length:.2f}",
        "drafted": "" if drafts is None else f"{drafts.mean_draft_length:.2f}",
        "ceiling": "" if row.ceiling is None else f"{row.ceiling.speedup:.2f}",
        "perfect": "" if row.perfect is None else f"{row.perfect.speedup:.2f}",
        "o": shown(row.overhead, ".2f"),
        "identical": "lossy" if not row.lossless else identical(exact),
        "repeats": shown(row.repeated, ".0%"),
        "prompts": f"{row.counted} of {row.prompts}",
    }
    return tuple(made[column] for column in columns)


def identical(exact: Exactness) -> str:
    return f"{exact.identical} of {exact.prompts}" if exact.comparable else "not comparable"


def over_peers(row: Row) -> str:
    ratios = ", ".join(f"{spread.median:.2f} x {name}" for name, spread in (row.over_peers or {}).items())
    lossy = "" if row.lossless else ", which is lossy,"
    return f"{row.workload}, batch {row.batch}: {row.contender}{lossy} is {ratios}"


def shown(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else format(spread.median, form)
