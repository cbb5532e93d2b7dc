"""Whether trees of drafted tokens would pay: what siblings and trees meet, and the gain that costs leave.

Figures of every drafter that gives probabilities, at temperature 0 and 1:

    places     by place in the chain: how often it is reached; P(the drafter's first choice is the target's
               token); P(the second is, given that the first is not); P(the third is, given neither)
    block      tokens that block verification keeps beside the `speculative` rule, of the same drafts
    gains      the best chain, the best chain with leaf siblings ("comb"; spread evenly or by the drafter's
               probabilities) and the best EAGLE-2 tree, by the same costs: speed-up over plain decoding, and
               the gain over the best chain

Choices are held against the target's own tokens. Under the `coupled` rule they are those that the shared
noise makes; under `speculative`, siblings are drawn without replacement, and recursive rejection judges
them. Costs are committed ones, in plain steps; host work costs nothing. One step drafts a level of a tree.

    python -m benchmarks.trees
    python -m benchmarks.trees --model FILE --kind real --drafters low-bit layer-skip --name trees_smollm2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.real_models import chat_and_code
from benchmarks.tree_replay import BEAM, CHOICES, SIZES, Met, Recorder, Sampled, replay
from benchmarks.workload import DEMO_LAYERS, demo_plan, fluent, machine, write
from foredraft import LLM, SamplingParams, demo
from foredraft.decode.policy import Fixed

LONGEST = 8  # tokens of a chain, levels of a tree
# Costs of a verifying pass, in plain steps, by rows: bench_demo_greedy.json, its median over six workloads;
# real_models.json; a large model on a CPU with a matrix unit (few_bits.json; its 32 rows are those of
# bench_widened_low_bit_0.json); and rows that cost nothing, as on a GPU.
PASSES: dict[str, dict[int, float]] = {
    "demo target": {1: 1.0, 2: 1.01, 4: 1.08, 6: 1.12, 8: 1.19, 16: 1.84, 32: 3.32},
    "SmolLM2-135M": {1: 1.0, 2: 1.0, 4: 1.02, 8: 1.14, 16: 1.27, 32: 1.95},
    "1.24 B": {1: 1.0, 6: 1.01, 8: 1.02, 16: 1.08, 32: 1.95},
    "6 rows 1.05, 16 rows 1.10": {1: 1.0, 6: 1.05, 16: 1.10, 32: 1.95},
    "free rows": {1: 1.0, 64: 1.0},
}
# Costs of the first draft step and of each further one, in plain steps: bench_demo_greedy.json; for low-bit
# bench_widened_low_bit_0.json, and the rates of SmolLM2 in 16 and 4 bits (real_models.json). Shares of the
# weights for SmolLM2's layer-skip, with REAL_PLAN, and for heads of one layer.
COSTS = {
    "demo": {
        "draft-model": (0.37, 0.11),
        "low-bit": (0.33, 0.29),
        "layer-skip": (0.28, 0.16),
        "eagle3": (0.3, 0.1),
    },
    "real": {"low-bit": (0.51, 0.51), "layer-skip": (0.78, 0.78), "eagle3": (0.2, 0.2)},
}
REAL_PLAN = "skip:attn=10-19/mlp=11-18"  # for SmolLM2; the search finds no plan that pays there
Shape = dict[str, Any]


def line(points: dict[int, float], at: float) -> float:
    """Return what lies on the line between two points, or beyond the last two."""
    known = sorted(points)
    upper = next((n for n in known if n >= at), known[-1])
    lower = max((n for n in known if n < upper), default=upper)
    if lower == upper:
        return points[upper]
    return points[lower] + (points[upper] - points[lower]) * (at - lower) / (upper - lower)


def lengths_along(texts: Sequence[Sequence[Met]], kept: Callable[[Met], float], *, walked: bool) -> float:
    """Return the mean tokens of a round: rounds along each text, or all that were recorded."""
    if not walked:
        return 1 + statistics.fmean(kept(met) for text in texts for met in text)
    rounds = tokens = 0
    for text in texts:
        at = 0
        while at < len(text):
            step = 1 + int(kept(text[at]))
            rounds, tokens, at = rounds + 1, tokens + step, at + step
    return tokens / rounds


def chain(met: Met, length: int) -> float:
    return min(met.hits, length)


def even_tree(met: Met, length: int, siblings: int, places: int) -> float:
    """Tokens of a chain whose first `places` have siblings."""
    return chain(met, length) + (met.siblings[siblings] if met.hits < min(length, places) else 0.0)


def chosen_tree(met: Met, length: int, siblings: int) -> float:
    """Tokens of a chain with so many siblings in all, the likeliest ones."""
    assert met.order is not None
    return chain(met, length) + float(met.hits < length and met.order[length] < siblings)


def gains(
    texts: Sequence[Sequence[Met]],
    first: float,
    further: float,
    passes: dict[int, float],
    *,
    walked: bool,
    sampled: Sequence[Sampled] = (),
) -> dict[str, Shape]:
    """Return the best chain, chain with leaves and EAGLE-2 tree by speed-up over plain decoding.

    Costs are in plain steps: of the first draft step, of each further one, and of a pass by rows. `walked`:
    what each token of the texts meets is known, so that rounds follow from the shape.
    """

    def shape(kept: Callable[[Met], float], steps: int, rows: int, width: int = 1, **named: int) -> Shape:
        drafting = first + (steps - 1) * further * line(passes, width)
        tokens = lengths_along(texts, kept, walked=walked)
        return {**named, "rows": rows, "tokens": tokens, "speedup": tokens / (drafting + line(passes, rows))}

    chains, with_leaves, trees = list[Shape](), list[Shape](), list[Shape]()
    some = texts[0][0]
    for n in range(1, LONGEST + 1):
        chains.append(shape(lambda met, n=n: chain(met, n), n, n + 1, length=n))  # type: ignore[misc]
        for m in range(1, CHOICES):
            for d in range(1, n + 1):
                kept = lambda met, n=n, m=m, d=d: even_tree(met, n, m, d)  # noqa: E731
                with_leaves.append(shape(kept, n, n + 1 + m * d, length=n, siblings=m, places=d))
        for m in range(1, 3 * n + 1) if some.order is not None else ():
            kept = lambda met, n=n, m=m: chosen_tree(met, n, m)  # noqa: E731
            with_leaves.append(shape(kept, n, n + 1 + m, length=n, chosen=m))
        for at, size in enumerate(SIZES) if some.tree is not None else ():
            kept = lambda met, n=n, at=at: met.tree[n - 1][at]  # noqa: E731
            trees.append(shape(kept, n, size + 1, BEAM, levels=n, nodes=size))
    found = {"chain": best(chains), "comb": best(with_leaves)}  # named so in kept results
    if trees:
        found["tree"] = best(trees)
    for each in found.values():
        each["gain"] = each["speedup"] / found["chain"]["speedup"]
    if sampled:
        found["chain, block"] = block_chain(block_gain(sampled), first, further, passes)
    return found


def block_chain(kept: dict[str, Any], first: float, further: float, passes: dict[int, float]) -> Shape:
    """Return the best chain under block verification; its gain is over the best one under `speculative`."""

    def chosen(rule: str) -> Shape:
        return best(
            {"length": n, "rows": n + 1, "tokens": tokens, "speedup": tokens / cost}
            for n, tokens in kept[rule].items()
            for cost in [first + (n - 1) * further + line(passes, n + 1)]
        )

    own, whole = chosen("speculative"), chosen("block")
    return {**whole, "gain": whole["speedup"] / own["speedup"]}


def best(shapes: Iterable[Shape]) -> Shape:
    return max(shapes, key=lambda shape: float(shape["speedup"]))


def by_place(texts: Sequence[Sequence[Met]]) -> list[dict[str, float | int]]:
    """Return the table of choices by place in the chain."""
    all_met = [met for text in texts for met in text]
    table: list[dict[str, float | int]] = []
    for place in range(LONGEST):
        reached = [met for met in all_met if met.hits >= place]
        wrong = [met for met in reached if met.hits == place]
        if not reached:
            break
        second = statistics.fmean(met.siblings[1] for met in wrong) if wrong else 0.0
        third = statistics.fmean(met.siblings[2] for met in wrong) - second if wrong else 0.0
        table.append(
            {
                "place": place + 1, "reached": len(reached), "first": 1 - len(wrong) / len(reached),
                "second": second, "third": third / (1 - second) if second < 1 else 0.0,
            }
        )  # fmt: skip
    return table


def block_gain(sampled: Sequence[Sampled]) -> dict[str, Any]:
    """Return the tokens of a round under both rules, by length of the draft."""
    lengths = range(1, LONGEST + 1)
    own = {n: 1 + statistics.fmean(each.speculative[n] for each in sampled) for n in lengths}
    block = {n: 1 + statistics.fmean(each.block[n] for each in sampled) for n in lengths}
    return {"speculative": own, "block": block, "gain": {n: block[n] / own[n] for n in lengths}}


def recorded(llm: LLM, drafter: str, heads: Sequence[list[int]], new: int, rule: str) -> Recorder:
    """Decode with drafts of the longest length, and note what its rounds met."""
    recorder = Recorder(llm, drafter, LONGEST)
    sampling: dict[str, Any] = {"temperature": 0} if rule == "greedy" else {"acceptance": rule}
    with recorder.watching():
        for at, prompt in enumerate(heads):
            params = SamplingParams(max_new_tokens=new, ignore_eos=True, drafter=drafter, seed=at, **sampling)
            llm.generate([prompt], params)
    return recorder


def measure(
    llm: LLM, drafter: str, heads: Sequence[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of a drafter."""
    first, further = options.costs[drafter]
    found: dict[str, Any] = {"costs": {"first": first, "further": further}, "rules": {}}
    for rule in ("greedy", "coupled", "speculative"):
        seen = recorded(llm, drafter, heads, options.new_tokens, rule)
        found["rules"][rule] = figures([seen.met], first, further, walked=False, sampled=seen.sampled)
        if seen.sampled:
            found["block"] = block_gain(seen.sampled)
    own = llm.loaded.engine.drafters[drafter].draft_pass
    if own is None or drafter in options.without_trees:
        return found
    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature,
            max_new_tokens=options.new_tokens,
            ignore_eos=True,
            drafter="none",
            seed=0,
        )
        texts = [
            replay(llm, drafter, prompt, llm.generate([prompt], params)[0].token_ids, LONGEST)
            for prompt in heads[: options.replayed]
        ]
        found["rules"][f"likeliest choices, temperature {temperature}"] = figures(
            texts, first, further, walked=True
        )
    return found


def figures(
    texts: Sequence[Sequence[Met]],
    first: float,
    further: float,
    *,
    walked: bool,
    sampled: Sequence[Sampled] = (),
) -> dict[str, Any]:
    """Return the places, and the gains at every cost of a pass."""
    return {
        "met": sum(map(len, texts)),
        "places": by_place(texts),
        "gains": {
            name: gains(texts, first, further, passes, walked=walked, sampled=sampled)
            for name, passes in PASSES.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(demo.target_path()), help="a folder or a file")
    parser.add_argument("--draft", default=None, help="a draft model or a head")
    parser.add_argument("--plan", default=None, help="of layer-skip")
    parser.add_argument("--kind", default="demo", choices=["demo", "real"], help="whose prompts and costs")
    parser.add_argument("--drafters", nargs="+", default=["draft-model", "low-bit", "layer-skip"])
    parser.add_argument(
        "--without-trees", nargs="*", default=["eagle3"], help="drafters that are not replayed"
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--replayed", type=int, default=12, help="prompts whose texts are replayed")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--name", default="trees")
    options = parser.parse_args(arguments)
    options.costs = COSTS[options.kind]
    more: dict[str, Any] = {"draft_weights": "int4"} if "low-bit" in options.drafters else {}
    if "draft-model" in options.drafters or options.draft:
        more["draft"] = options.draft or demo.draft_path()
    plan = demo_plan(DEMO_LAYERS) if options.kind == "demo" else REAL_PLAN
    llm = foredraft.load(
        Path(options.model), plan=options.plan or plan, device="cpu", max_batch=1, max_length=1024,
        max_draft=LONGEST, **more,
    )  # fmt: skip
    llm.loaded.engine.policy = Fixed(LONGEST)
    if options.kind == "demo":
        heads = fluent(llm, options.prompts)
    else:
        heads = chat_and_code(llm, options.prompts)
    found = {drafter: measure(llm, drafter, heads, options) for drafter in options.drafters}
    what = {key: value for key, value in vars(options).items() if key not in ("model", "draft")}
    write(options.name, {"what": what, "machine": machine(), "passes": PASSES, "drafters": found})


if __name__ == "__main__":
    main()
