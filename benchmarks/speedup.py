"""Speed-up of drafting over own plain decoding on held-out code, batch 1.

Plain and speculative decoding of the same prompt alternate (the order flips each time), warm, in one
process; the figure of a prompt is the median of its pairwise ratios, the result the median over prompts
with quartiles. Beside it stand the exactness flag (token ids identical in every run), alpha and tau, c and
v timed as bare forwards in the same run, the predicted speed-up S = tau / (K c + v(K + 1)), and the share
of 4-grams that an output repeats: prompts whose output repeats 30 % or more are left out of the headline.

    python benchmarks/speedup.py --prompts 40 --new-tokens 96 --alternations 5
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median, quantiles
from typing import Any

import torch
from workload import heldout, machine, repeated_share, write

import foredraft
from foredraft import LLM, SamplingParams, Stats


def rate(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, foredraft.Output]:
    start = time.perf_counter()
    (output,) = llm.generate(prompt, params)
    return len(output.token_ids) / (time.perf_counter() - start), output


def compare(
    llm: LLM, prompt: str, params: SamplingParams, plain: SamplingParams, alternations: int
) -> dict[str, Any]:
    """One prompt's pairwise ratios."""
    rate(llm, prompt, plain), rate(llm, prompt, params)
    ratios: list[float] = []
    texts: set[tuple[int, ...]] = set()
    stats = Stats()
    for index in range(alternations):
        if index % 2:
            fast, output = rate(llm, prompt, params)
            slow, other = rate(llm, prompt, plain)
        else:
            slow, other = rate(llm, prompt, plain)
            fast, output = rate(llm, prompt, params)
        ratios.append(fast / slow)
        texts |= {tuple(output.token_ids), tuple(other.token_ids)}
        stats = output.stats
    return {
        "speedup": median(ratios),
        "ratios": [round(r, 3) for r in ratios],
        "identical": len(texts) == 1,
        "tokens": len(output.token_ids),
        "repeated_4grams": round(repeated_share(output.token_ids), 3),
        "alpha": stats.alpha,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_rate": stats.acceptance_rate,
    }


def cost(llm: LLM, widths: range, repeats: int = 40) -> dict[str, Any]:
    """Bare forwards at 256 tokens of context, in plain steps of the target: medians of interleaved runs."""
    engine = llm.engine
    draft: Any = engine.drafters["draft-model"]
    target: Any = engine.target
    seconds: dict[str, list[float]] = {}
    caches = target.new_cache(1, llm.max_length), draft.runner.new_cache(1, llm.max_length)
    for _ in range(repeats):
        for width in widths:
            tokens = torch.zeros(1, width, dtype=torch.int64)
            start = time.perf_counter()
            target.forward(caches[0], tokens, [255])
            seconds.setdefault(f"v{width}", []).append(time.perf_counter() - start)
        start = time.perf_counter()
        at = torch.zeros(1, dtype=torch.int64)
        draft.runner.forward(caches[1], torch.zeros(1, 1, dtype=torch.int64), [255], at=at, exact=False)
        seconds.setdefault("c", []).append(time.perf_counter() - start)
    step = median(seconds["v1"])
    figures: dict[str, Any] = {name: round(median(s) / step, 3) for name, s in seconds.items()}
    return figures | {"step_ms": round(step * 1e3, 3), "step_ms_least": round(min(seconds["v1"]) * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--max-draft", type=int, default=5)
    parser.add_argument("--policy", default="fixed")
    parser.add_argument("--drafter", default="draft-model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="speedup")
    options = parser.parse_args()
    llm = foredraft.load(
        dtype=options.dtype, device="cpu", max_batch=1, policy=options.policy, max_draft=options.max_draft
    )
    base = {"temperature": 0.0, "max_new_tokens": options.new_tokens, "ignore_eos": True}
    params = SamplingParams(**base, speculation=options.drafter)
    plain = SamplingParams(**base, speculation="none")
    runs = [compare(llm, p, params, plain, options.alternations) for p in heldout(options.prompts)]
    fresh = [run for run in runs if run["repeated_4grams"] < 0.3]
    costs = cost(llm, range(1, options.max_draft + 2))
    tau = mean(run["mean_accepted_length"] for run in fresh)
    predicted = tau / (options.max_draft * costs["c"] + costs[f"v{options.max_draft + 1}"])
    low, middle, high = quantiles([run["speedup"] for run in fresh], n=4)
    result = {
        "what": vars(options),
        "machine": machine(),
        "speedup": {"median": middle, "quartiles": [low, high], "prompts": len(fresh), "of": len(runs)},
        "speedup_all_prompts": median(run["speedup"] for run in runs),
        "identical": all(run["identical"] for run in runs),
        "alpha": mean(run["alpha"] for run in fresh),
        "mean_accepted_length": tau,
        "acceptance_rate": mean(run["acceptance_rate"] for run in fresh),
        "repeated_4grams": mean(run["repeated_4grams"] for run in fresh),
        "costs_in_plain_steps": costs,
        "predicted": predicted,
        "measured_over_predicted": middle / predicted,
        "runs": runs,
    }
    write(options.name, result)


if __name__ == "__main__":
    main()
