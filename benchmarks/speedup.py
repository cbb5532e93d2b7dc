"""Speed-up of drafting over own plain decoding on held-out code, batch 1.

Plain and speculative decoding of the same prompt alternate as in `foredraft generate --compare`; the figure
of a prompt is the median of its pairwise ratios, the result the median over prompts with quartiles. Beside it
stand the exactness flag (token ids identical in every run), alpha and tau, c and v timed as bare forwards in
the same run, and the predicted speed-up S = tau / (k c + v(k + 1)) at each prompt's own tau and mean draft
length k. Prompts whose output repeats too many of its 4-grams do not qualify for the headline: drafting is
easy there. Their share is in the result.

    python benchmarks/speedup.py --prompts 40 --new-tokens 96 --alternations 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import torch
from workload import heldout, machine, write

import foredraft
from foredraft import LLM, SamplingParams, Stats
from foredraft.cli.compare import alternate
from foredraft.demo.recipe.completions import repeated
from foredraft.kinds import DRAFTERS, POLICIES


def measure(llm: LLM, prompt: str, drafter: str, new_tokens: int, alternations: int) -> dict[str, Any]:
    """One prompt's pairwise ratios, and what its drafts were like."""
    drafted: list[foredraft.Output] = []

    def run(speculation: str, outputs: list[foredraft.Output]) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_new_tokens=new_tokens, ignore_eos=True, speculation=speculation
        )
        outputs += llm.generate(prompt, params)
        return [outputs[-1].token_ids]

    comparison = alternate(
        lambda: run("none", []), lambda: run(drafter, drafted), comparable=True, alternations=alternations
    )
    stats, ids = drafted[-1].stats, drafted[-1].token_ids
    return {
        "speedup": comparison.speedup,
        "ratios": [round(ratio, 3) for ratio in comparison.speedups],
        "identical": comparison.identical,
        "tokens": len(ids),
        "repeated_4grams": round(repeated(ids), 3),
        "alpha": stats.alpha,
        "mean_accepted_length": stats.mean_accepted_length,
        "mean_draft_length": mean_draft_length(stats),
        "acceptance_rate": stats.acceptance_rate,
    }


def mean_draft_length(stats: Stats) -> float:
    """As drafted: a policy, a limit or a look-up that finds little makes it shorter than --max-draft."""
    return stats.drafted / stats.rounds if stats.rounds else 0.0


def cost(llm: LLM, drafter: str, longest: int, repeats: int = 40) -> dict[str, Any]:
    """Bare forwards at 256 tokens of context, in plain steps of the target: medians of interleaved runs.

    v: of 1, 2, ... rows. c: of a drafted token; looking up in the text takes no forward.
    """
    target: Any = llm.engine.target
    stepper: Any = llm.engine.drafters[drafter] if DRAFTERS[drafter].stepper else None
    cache = target.new_cache(1, llm.max_length)
    own = None if stepper is None else stepper.runner.new_cache(1, llm.max_length)
    rows: list[list[float]] = [[] for _ in range(longest + 1)]
    drafting: list[float] = []
    at, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(repeats):
        for width, seconds in enumerate(rows, start=1):
            tokens = torch.zeros(1, width, dtype=torch.int64)
            start = time.perf_counter()
            target.forward(cache, tokens, [255])
            seconds.append(time.perf_counter() - start)
        if stepper is not None:
            start = time.perf_counter()
            stepper.runner.forward(own, token, [255], at=at, exact=False)
            drafting.append(time.perf_counter() - start)
    step = median(rows[0])
    return {
        "v": [round(median(seconds) / step, 3) for seconds in rows],
        "c": round(median(drafting) / step, 3) if drafting else 0.0,
        "step_ms": round(step * 1e3, 3),
        "step_ms_least": round(min(rows[0]) * 1e3, 3),
    }


def predicted(tau: float, length: float, v: Sequence[float], c: float) -> float:
    """S at a mean draft length; v between two row counts lies on the line between their costs."""
    below = min(int(length), len(v) - 1)
    above = min(below + 1, len(v) - 1)
    return tau / (length * c + v[below] + (length - below) * (v[above] - v[below]))


def spread(figures: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of however many there are; quartiles lie within the data."""
    if not figures:
        return {"median": None, "quartiles": None, "prompts": 0}
    quartiles = quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [figures[0]] * 3
    return {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "prompts": len(figures)}


def summary(runs: Sequence[dict[str, Any]], costs: dict[str, Any], max_repeated: float) -> dict[str, Any]:
    """The headline, over the prompts that qualify; None where none does."""
    fresh = [run for run in runs if run["repeated_4grams"] < max_repeated]
    expected = [
        predicted(run["mean_accepted_length"], run["mean_draft_length"], costs["v"], costs["c"])
        for run in fresh
    ]
    ratios = [run["speedup"] / share for run, share in zip(fresh, expected, strict=True)]

    def middle(name: str) -> float | None:
        return spread([run[name] for run in fresh if run[name] is not None])["median"]

    return {
        "speedup": spread([run["speedup"] for run in fresh]),
        "qualifying_share": len(fresh) / len(runs) if runs else None,
        "speedup_all_prompts": spread([run["speedup"] for run in runs]),
        "identical": all(run["identical"] for run in runs),
        "alpha": middle("alpha"),
        "mean_accepted_length": middle("mean_accepted_length"),
        "mean_draft_length": middle("mean_draft_length"),
        "acceptance_rate": middle("acceptance_rate"),
        "repeated_4grams": middle("repeated_4grams"),
        "costs_in_plain_steps": costs,
        "predicted": spread(expected)["median"],
        "measured_over_predicted": spread(ratios)["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompts-from", type=int, default=0, help="held-out prompts to pass over")
    parser.add_argument("--max-repeated", type=float, default=0.3, help="share of repeated 4-grams")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--max-draft", type=int, help="by default the policy's own")
    parser.add_argument("--policy", default="fixed", choices=POLICIES)
    drafters = [name for name, kind in DRAFTERS.items() if kind.make is not None]
    parser.add_argument("--drafter", default="draft-model", choices=drafters)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="speedup")
    options = parser.parse_args()
    prompts = heldout(options.prompts, options.prompts_from)
    if not prompts:
        parser.error(f"no held-out prompts from {options.prompts_from} on")
    longest = options.max_draft or POLICIES[options.policy].max_draft
    llm = foredraft.load(
        dtype=options.dtype, device="cpu", max_batch=1, policy=options.policy, max_draft=longest
    )
    runs = [
        measure(llm, prompt, options.drafter, options.new_tokens, options.alternations) for prompt in prompts
    ]
    result = summary(runs, cost(llm, options.drafter, longest), options.max_repeated)
    write(options.name, {"what": vars(options), "machine": machine(), **result, "runs": runs})


if __name__ == "__main__":
    main()
