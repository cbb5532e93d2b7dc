"""Write the tables of measured figures in README and docs from the committed results.

A table lies between two comments, the first of which names it. This script writes everything between them.

    python -m benchmarks.figures          list the pages with outdated tables; exit code 1 if there are any
    python -m benchmarks.figures --write  update these tables
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from foredraft.bench.bench_records import BenchReport, Row, Spread
from foredraft.files import write_whole

HERE = Path(__file__).parent
PAGES = (
    "README.md", "docs/reproduction.md", "docs/guides/bild.md", "docs/guides/scaling.md",
    "docs/guides/train.md", "docs/guides/fewer-bits.md",
)  # fmt: skip
BLOCK = re.compile(
    r"(?<=<!-- figures: )(?P<name>[^>]*?)(?P<gap> -->\n)(?P<lines>.*?)(?=<!-- /figures -->)", re.S
)

MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M", "llama1b": "Llama, 1.24 B, random"}
ROWS = ("2", "4", "8", "16")  # tokens of a pass
BUSY = ("1", "2", "4")  # processes beside

Cells = Sequence[str]


@cache
def result(name: str) -> dict[str, Any]:
    """Return a committed result file."""
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@cache
def report(name: str) -> BenchReport:
    """Return a committed report of `foredraft bench` on the demo models."""
    return BenchReport.from_dict(result(f"bench_demo_{name}"))


def rows(name: str, contender: str, workload: str | None = None, policy: str | None = None) -> list[Row]:
    """Return a contender's rows with figures at batch size 1; there must be at least one."""
    found = [
        row
        for row in report(name).rows
        if row.contender == contender and row.batch == 1 and row.speedup is not None
        if workload in (None, row.workload) and policy in (None, row.policy)
    ]
    assert found, (name, contender, workload, policy)
    return found


def table(head: Cells, *lines: Cells) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def span(values: Iterable[float | None], digits: int = 2) -> str:
    """Return the smallest and the largest value, as in "1.85 to 2.16"."""
    known = sorted(value for value in values if value is not None)
    low, high = (f"{value:.{digits}f}" for value in (known[0], known[-1]))
    return low if low == high else f"{low} to {high}"


def percent(values: Iterable[float | None]) -> str:
    return f"{span((value * 100 for value in values if value is not None), 0)} %"


def median_of(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def gain(found: Sequence[Row]) -> str:
    return span(median_of(row.speedup) for row in found)


def over(found: Sequence[Row], peer: str) -> str:
    return span(median_of((row.over_peers or {}).get(peer)) for row in found)


def identical(found: Sequence[Row]) -> str:
    flags = [row.exactness for row in found if row.exactness is not None]
    if not all(flag.comparable for flag in flags):
        return "distribution tested instead"
    return f"{sum(flag.identical for flag in flags)} of {sum(flag.prompts for flag in flags)}"


def drafts(found: Sequence[Row], *names: str, digits: int = 2) -> list[str]:
    return [span((getattr(row.drafting, name) for row in found), digits) for name in names]


def speed() -> list[str]:
    def line(label: str, figure: Callable[[str], str]) -> Cells:
        return label, figure("greedy"), figure("sampled")

    def gains(contender: str) -> Callable[[str], str]:
        return lambda name: gain(rows(name, contender))

    def lossless(name: str) -> list[Row]:
        return [row for row in report(name).rows if not row.peer and row.lossless and row.speedup is not None]

    def over_peer(contender: str, peer: str) -> Callable[[str], str]:
        return lambda name: over(rows(name, contender), peer) if name == "greedy" else ""

    def repetition(name: str) -> str:
        return percent(median_of(row.repeated) for row in lossless(name))

    def low_bit_gain(name: str) -> str:
        found = BenchReport.from_dict(result(f"bench_widened_low_bit_{('greedy', 'sampled').index(name)}"))
        return gain([row for row in found.rows if row.contender == "low-bit" and row.speedup is not None])

    def few_bits_step(name: str) -> str:
        ratios = result("few_bits_vectors")["peer_over_foredraft"]
        steps = (ratios[f"{peer} int4"]["1"]["median"] for peer in ("llama.cpp", "OpenVINO"))
        return ", ".join(f"{step:.2f}" for step in steps) if name == "greedy" else ""

    assisted = over_peer("draft-model", "transformers-assisted")
    return table(
        ("ratio of tokens/s, from the worst to the best workload", "temperature 0", "temperature 1"),
        line("plain decoding ÷ `generate` of `transformers`", over_peer("plain", "transformers")),
        line("plain decoding ÷ llama.cpp", over_peer("plain", "llama.cpp")),
        line("`draft-model` ÷ plain decoding", gains("draft-model")),
        line("`draft-model` ÷ `generate` with `assistant_model`", assisted),
        line("`layer-skip` (no second model) ÷ plain decoding", gains("layer-skip")),
        line("`lookup` ÷ plain decoding", gains("lookup")),
        line("`low-bit` (a copy in 4 bits) ÷ plain decoding, steps of 10 ms", low_bit_gain),
        line("4 bits, 1.24 B: a step of llama.cpp, of OpenVINO ÷ Foredraft's", few_bits_step),
        line("outputs identical to plain decoding's", lambda name: identical(lossless(name))),
        line("repeated 4-grams in an output", repetition),
    )


def speculative_sampling() -> list[str]:
    found = rows("greedy", "draft-model"), rows("sampled", "draft-model")
    return table(
        ("", "temperature 0", "temperature 1"),
        ("`draft-model` ÷ plain decoding", *map(gain, found)),
        ("α", *(drafts(each, "alpha")[0] for each in found)),
        ("τ", *(drafts(each, "mean_accepted_length", digits=1)[0] for each in found)),
        ("v(6)", *(_verifying(name, 6) for name in ("greedy", "sampled"))),
        ("measured ÷ predicted speed-up", *(_over_predicted(each) for each in found)),
        ("outputs identical to plain decoding's", *map(identical, found)),
    )


def _verifying(name: str, row_count: int) -> str:
    return span(
        cost.v
        for costs in report(name).costs
        for cost in costs.verifying
        if cost.rows == row_count and costs.batch == 1
    )


def _over_predicted(found: Sequence[Row]) -> str:
    return span(median_of(row.measured_over_predicted) for row in found)


def assisted_generation() -> list[str]:
    return table(
        ("", "ratio of tokens/s"),
        (
            "`transformers`: `generate` with `assistant_model` ÷ `generate`",
            over(rows("greedy", "transformers-assisted"), "transformers"),
        ),
        (
            "`draft-model` ÷ `generate` with `assistant_model`",
            over(rows("greedy", "draft-model"), "transformers-assisted"),
        ),
        ("plain decoding ÷ `generate`", over(rows("greedy", "plain"), "transformers")),
    )


def _by_policy(*policies: str, contender: str = "draft-model") -> list[str]:
    lines = []
    for policy in policies:
        found = rows("policies", contender, policy=policy)
        lines.append(
            (
                f"`{policy}`",
                gain(found),
                *drafts(found, "alpha"),
                *drafts(found, "mean_accepted_length", "mean_draft_length", digits=1),
                _over_predicted(found),
                identical(found),
            )
        )
    head = "policy", "over plain", "α", "τ", "draft length", "measured ÷ predicted", "identical"
    return table(head, *lines)


def the_cache() -> list[str]:
    (row,) = rows("greedy", "plain", "complete-function")
    (costs,) = [
        costs for costs in report("greedy").costs if costs.workload == row.workload and costs.batch == 1
    ]
    prefill = median_of(row.prefill_seconds)
    assert prefill is not None
    step = costs.step_seconds
    return table(
        ("", "prefill, ms", "bare plain step, ms", "ratio"),
        (
            "demo target, median prompt of `complete-function`",
            f"{prefill * 1e3:.1f}",
            f"{step * 1e3:.2f}",
            f"{prefill / step:.0f}",
        ),
    )


def layer_skipping() -> list[str]:
    found = [
        (row.workload, policy, row, name)
        for name, policy in (
            ("policies", "auto"),
            ("policies", "fixed"),
            ("greedy", "fixed"),
            ("sampled", "fixed"),
        )
        for row in rows(name, "layer-skip", policy=policy)
    ]
    lines = []
    for workload, policy, row, name in found:
        costs = next(costs for costs in report(name).costs if costs.workload == workload and costs.batch == 1)
        assert row.ceiling is not None and row.perfect is not None
        lines.append(
            (
                f"`{workload}`, `{policy}`" + (", temperature 1" if name == "sampled" else ""),
                gain([row]),
                f"{costs.drafting['layer-skip'].first:.2f}, {costs.drafting['layer-skip'].further:.2f}",
                *drafts([row], "alpha"),
                *drafts([row], "mean_accepted_length", digits=1),
                f"{row.ceiling.speedup:.2f}, {row.perfect.speedup:.2f}",
                _over_predicted([row]),
                percent([median_of(row.repeated)]),
                identical([row]),
            )
        )
    return table(
        (
            "workload and policy", "over plain", "c of the first step, of others", "α", "τ",
            "ceiling at α, at 1", "measured ÷ predicted", "repeated", "identical",
        ),
        *lines,
    )  # fmt: skip


def the_search() -> list[str]:
    """Compare the plans of the search with others; a plan that was a finalist has its measured figures."""
    found = result("tune_demo")
    plans, finalists = found["plans"], {finalist["skips"]: finalist for finalist in found["finalists"]}
    labels: dict[str, str] = {}  # the first line that has a plan; later lines refer to it

    def line(label: str, skips: str, predicted: float) -> Cells:
        cells = [label, f"as {labels[skips]}" if skips in labels else f"`{skips}`"]
        labels.setdefault(skips, label)
        if (finalist := finalists.get(skips)) is None:
            return *cells, "", "", "", f"{predicted:.2f}", "", ""
        return (
            *cells,
            f"{finalist['c']:.2f}",
            f"{finalist['alpha']:.2f}",
            f"{finalist['predicted_tau']:.2f}, {finalist['tau']:.2f}",
            f"{predicted:.2f}",
            f"{finalist['speedup']['median']:.2f}",
            f"{finalist['prompts'] if finalist['identical'] else 'not all'} of {finalist['prompts']}",
        )

    lines = [line("search, best predicted", plans["search"]["skips"], plans["search"]["predicted"])]
    if found["winner"] is not None:
        winner = found["finalists"][found["winner"]]
        lines.append(line("search, best measured", winner["skips"], winner["predicted"]))
    names = {
        "greedy": "greedy ranking",
        "clasp": "dynamic programme (CLaSp)",
        "random of its size": "best of {} random plans of the same size",
    }
    for key, label in names.items():
        plan = plans[key]
        lines.append(line(label.format(f"{plan['plans']:,}"), plan["skips"], plan["predicted"]))
    head = "plan found by", "plan", "c", "α", "predicted τ, decoded τ"
    return table((*head, "predicted speed-up", "measured speed-up", "identical"), *lines)


def big_little_decoder() -> list[str]:
    plain, *others = result("bild")["rows"]
    lines = []
    for row in others:
        if row["fallback"] == 0.9 or row["rollback"] not in (None, 5.0):
            continue
        rule = f"`bild`, rollback {row['rollback']:g}" if row["rollback"] else "lossless rule"
        lines.append(
            (
                f"{rule}, fallback {row['fallback']:g}",
                f"{row['over_plain']['median']:.2f}",
                percent([row["exact"]]),
                f"{row['loss']:.3f}, {plain['loss']:.3f}",
                percent([row["repeated_4grams"]]),
            )
        )
    head = (
        "",
        "over plain",
        "outputs identical to plain decoding's",
        "loss under the target, nats per token; of plain decoding",
        "repeated",
    )
    return table(head, *lines)


def the_lossy_rule() -> list[str]:
    """Return the whole grid of the benchmark of the lossy rule."""

    def line(row: dict[str, Any]) -> Cells:
        speed = row["over_plain"]
        return (
            "" if row["fallback"] is None else f"{row['fallback']:g}",
            row["mode"],
            f"{speed['median']:.2f} ({speed['lower']:.2f} to {speed['upper']:.2f})",
            f"{row['loss']:.3f}",
            percent([row["exact"]]),
            percent([row["up_to_the_first_other"]]),
            f"{row['mean_accepted_length']:.2f}",
            percent([row["repeated_4grams"]]),
        )

    head = (
        "fallback",
        "mode",
        "over plain (quartiles)",
        "loss",
        "exact",
        "before first difference",
        "τ",
        "repeated",
    )
    return table(head, *map(line, result("bild")["rows"]))


def two_replicas() -> list[str]:
    """Show what was measured with 2 replicas."""
    found = result("scaling")["measured"]
    cluster, route = found["cluster"], found["rule"]["route_seconds"]

    def milliseconds(name: str) -> str:
        used = cluster[f"cpu_seconds_per_{name}"]
        return f"{1000 * used['proxy']:.1f} + {1000 * used['ingress']:.1f} ms"

    hits = cluster["hit_share"]
    return table(
        ("measured, 2 replicas", ""),
        ("prompt tokens from the prefix caches, by affinity", f"{hits['affinity']:.0%}"),
        ("the same, with a key of its own for each request", f"{hits['own_key_each']:.0%}"),
        ("CPU of proxy + ingress for a chunk of a stream", milliseconds("chunk")),
        ("CPU of proxy + ingress for a request of one token", milliseconds("request")),
        ("bytes of a chunk", f"{cluster['bytes_per_chunk']:.0f}"),
        ("choosing among 2, and among 1,000", f"{route['2'] * 1e6:.0f} and {route['1000'] * 1e6:.0f} µs"),
    )


def many_replicas() -> list[str]:
    """Show what was simulated and computed for more."""
    found = result("scaling")

    def line(count: str) -> Cells:
        simulated, computed = found["simulated"][count], found["computed"][count]
        affine, own = simulated["affinity"], simulated["own_key_each"]
        return (
            f"{int(count):,}", f"{affine['hit_share']:.0%}", f"{own['hit_share']:.0%}",
            f"{affine['largest_over_mean_load']:.2f}", f"{computed['chunks_per_second']:,.0f}",
            f"{sum(computed['cores'].values()):.1f}", f"{computed['bytes_per_second'] / 1e6:.1f}",
        )  # fmt: skip

    return table(
        (
            "replicas", "hits, by affinity", "hits, own keys", "largest ÷ mean load",
            "chunks/s", "cores of proxies and ingresses", "MB/s",
        ),
        *map(line, found["simulated"]),
    )  # fmt: skip


def kangaroo() -> list[str]:
    """The trained adapter beside the other drafters, on the demo target and on one trained plainly."""

    def line(name: str, model: str, contender: str) -> Cells:
        found = rows(f"kangaroo_{name}", contender)
        costs = [costs.drafting[contender].further for costs in report(f"kangaroo_{name}").costs]
        alpha, tau = drafts(found, "alpha", "mean_accepted_length")
        temperature = "1" if "sampled" in name else "0"
        return (
            f"`{contender}`, {model}", temperature, gain(found), alpha, tau, span(costs),
            _over_predicted(found),
        )  # fmt: skip

    contenders = ("kangaroo", "layer-skip", "draft-model", "lookup")
    lines = [line(name, "demo", each) for name in ("greedy", "sampled") for each in contenders]
    lines += [line("plainly", "without layer dropout", each) for each in ("kangaroo", "layer-skip")]
    head = ("drafter and target", "temperature", "over plain", "α", "τ", "c", "measured ÷ predicted")
    return table(head, *lines)


def losses() -> list[str]:
    """α of the demo target's adapter after equal steps of each loss."""
    found = result("training_losses")["losses"]
    lines = [
        (f"`{name}`", f"{each['alpha']:.3f}", f"{each['agreement']:.3f}", f"{each['tau']:.2f}")
        for name, each in found.items()
    ]
    return table(("loss", "α at temperature 1", "same argmax", "τ"), *lines)


def low_bit() -> list[str]:
    """Drafts of a target's own copy in 4 bits, where a step waits for memory."""
    lines = []
    for temperature in (0, 1):
        found = BenchReport.from_dict(result(f"bench_widened_low_bit_{temperature}"))
        own = [row for row in found.rows if row.contender == "low-bit" and row.speedup is not None]
        step = span(costs.drafting["low-bit"].further for costs in found.costs)
        alpha, tau = drafts(own, "alpha", "mean_accepted_length")
        lines.append((str(temperature), gain(own), alpha, tau, step, _over_predicted(own), identical(own)))
    head = ("temperature", "over plain", "α", "τ", "c", "measured ÷ predicted", "identical")
    return table(head, *lines)


FEW_BITS = {"vectors": "few_bits_vectors", "matrix unit": "few_bits"}  # products by -> result


def few_bits() -> list[str]:
    """Steps and passes of a large shape in 16, 8 and 4 bits."""

    def spread_of(values: dict[str, Any], digits: int = 2) -> str:
        return f"{values['median']:.{digits}f}"

    return table(
        ("products by", "weights", "plain step, ms", "v(4)", "v(8)", "v(16)", "c beside bfloat16"),
        *(
            (
                unit,
                name,
                spread_of(found["milliseconds"][name]["1"], 1),
                *(spread_of(found["v"][name][str(count)]) for count in (4, 8, 16)),
                spread_of(found["c"][name]) if name in found["c"] else "",
            )
            for unit, found in ((unit, result(file)) for unit, file in FEW_BITS.items())
            for name in ("bfloat16", "int8", "int4")
        ),
    )


def few_bits_peers() -> list[str]:
    """The same passes by other programs, in times of Foredraft's."""
    rows = (
        (unit, name, *(f"{ratios[name][count]['median']:.2f}" for count in ("1", "4", "8", "16")))
        for unit, ratios in ((unit, result(file)["peer_over_foredraft"]) for unit, file in FEW_BITS.items())
        for name in ratios
    )
    return table(("products by", "program and weights", "1 token", "4", "8", "16"), *rows)


def headline() -> list[str]:
    """One number with its baseline, as a sentence."""
    drafting, plain = rows("greedy", "draft-model"), rows("greedy", "plain")
    return [
        f"On two cores of a CPU, the demo models write **{gain(drafting)} times as many tokens per second**",
        "as plain decoding, from the worst to the best kind of prompt, and the same text in"
        f" {identical(drafting)} outputs.",
        f"Plain decoding is {over(plain, 'llama.cpp')} times as fast as llama.cpp on the same weights there,",
        f"with AVX-512; on published models and a larger shape {_over_peer('x86-64-v4-bf16')} times with",
        f"AVX-512 BF16, and {_over_peer('x86-64-v3')} times with AVX2 alone.",
    ]


def _over_peer(level: str) -> str:
    files = [file for types in result(f"real_models_{level}")["models"].values() for file in types.values()]
    return span(file["decoding"]["0"]["over_peer"]["median"] for file in files)


def _lines_of_models(
    lines: dict[str, Callable[[dict[str, Any]], str]], name: str = "real_models"
) -> list[str]:
    """Return a table with a column for each type of file, and a line for each model and label that it has."""
    models = result(name)["models"]
    types = list(dict.fromkeys(each for files in models.values() for each in files))
    made = (
        (f"{MODELS[model]}, {label}", *(cell(files[each]) if each in files else "" for each in types))
        for label, cell in lines.items()
        for model, files in models.items()
    )
    return table(("", *types), *(line for line in made if any(line[1:])))


def _medians(found: dict[str, Any], ratio: str, keys: Iterable[str]) -> str:
    return ", ".join(f"{found[key][ratio]['median']:.2f}" for key in keys if ratio in found[key])


def _gains(found: dict[str, Any], kind: str) -> str:
    """Return the gains of the drafters that a file has on a kind of texts."""
    drafters = found.get("drafters", {}).get(kind, {})
    return ", ".join(f"{name} {drafter['gain']['median']:.2f}" for name, drafter in drafters.items())


def _decoding_and_prompts(file: dict[str, Any], ratio: str) -> str:
    cells = _medians(file["decoding"], ratio, "0"), _medians(file["prompt"], ratio, file["prompt"])
    return ", ".join(filter(None, cells))


IN_FULL: dict[str, Callable[[dict[str, Any]], str]] = {
    "prompts of 256, 1,024 tokens": lambda file: _medians(file["prompt"], "over_peer", file["prompt"]),
    "passes of 2, 4, 8, 16 tokens": lambda file: _medians(file["pass"], "over_peer", ROWS),
    "drafters ÷ plain, code": lambda file: _gains(file, "HumanEval"),
    "drafters ÷ plain, chat": lambda file: _gains(file, "chat"),
}
DECODING: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda file: f"{file['decoding']['0']['own']['median']:.0f}",
    "÷ llama.cpp": lambda file: _medians(file["decoding"], "over_peer", "0"),
}


def real_models() -> list[str]:
    """Plain decoding beside llama.cpp on the same files, and what `auto` adds."""
    return _lines_of_models(
        {
            **DECODING,
            "÷ llama.cpp, 4 busy processes beside": lambda file: _medians(file["decoding"], "over_peer", "4"),
            "a prompt of 1,024 tokens ÷ llama.cpp": lambda file: _medians(
                file["prompt"], "over_peer", ["1024"]
            ),
            "`auto` ÷ plain, code, chat": lambda file: ", ".join(
                _medians(drafters, "gain", ["auto"]) for drafters in file["drafters"].values()
            ),
        }
    )


def real_models_in_full() -> list[str]:
    """The figures of the two models that the table above leaves out."""
    return _lines_of_models(
        {
            "÷ llama.cpp beside 1, 2, 4 busy processes": lambda file: _medians(
                file["decoding"], "over_peer", BUSY
            ),
            **IN_FULL,
        }
    )


def real_models_by_level(level: str) -> list[str]:
    """The same models, and a larger shape, by the kernels of a level of CPUs."""

    def growth(program: str) -> Callable[[dict[str, Any]], str]:
        return lambda file: ", ".join(f"{file['pass'][rows]['v'][program]['median']:.2f}" for rows in ROWS)

    return _lines_of_models(
        {
            **DECODING,
            **IN_FULL,
            "v(2), v(4), v(8), v(16)": growth("own"),
            "the same of llama.cpp": growth("llama.cpp"),
            "decoding, prompts: float16 ÷ bfloat16": lambda file: _decoding_and_prompts(
                file, "float16_over_bfloat16"
            ),
            "decoding, prompts: ÷ before": lambda file: _decoding_and_prompts(file, "over_before"),
        },
        f"real_models_{level}",
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "speed": speed,
    "speculative sampling": speculative_sampling,
    "assisted generation": assisted_generation,
    "assisted policies": lambda: _by_policy("heuristic", "confidence"),
    "the cache": the_cache,
    "layer skipping": layer_skipping,
    "the search": the_search,
    "adaptive exit": lambda: _by_policy("fixed", "confidence", "adaptive-exit", "auto"),
    "gate": lambda: _by_policy("target-confidence"),
    "big little decoder": big_little_decoder,
    "the lossy rule": the_lossy_rule,
    "two replicas": two_replicas,
    "many replicas": many_replicas,
    "kangaroo": kangaroo,
    "losses": losses,
    "few bits": few_bits,
    "few bits, peers": few_bits_peers,
    "low bit": low_bit,
    "real models": real_models,
    "real models in full": real_models_in_full,
    "real models, AVX-512": lambda: real_models_by_level("x86-64-v4-bf16"),
    "real models, AVX2": lambda: real_models_by_level("x86-64-v3"),
}


def brought_up_to_date(page: str) -> str:
    """Return the page with the tables that the results give; KeyError where it names an unknown one."""
    return BLOCK.sub(lambda found: f"{found['name']}{found['gap']}{_lines(found['name'])}", page)


def _lines(name: str) -> str:
    return "\n" + "\n".join(TABLES[name]()) + "\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    stale = False
    for name in PAGES:
        path = HERE.parent / name
        page = path.read_text(encoding="utf-8")
        made = brought_up_to_date(page)
        if made == page:
            continue
        stale = True
        if options.write:
            write_whole(path, made, "the page")
        print(f"{name}: {'updated' if options.write else 'tables are out of date'}")
    return 1 if stale and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
