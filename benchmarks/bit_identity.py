"""Greedy output of every method against plain decoding, token by token.

For each prompt: plain decoding at batch 1 is the reference; the draft model at several draft lengths,
lookup, and both at batch 8 with mixed neighbours must give the same ids. Any divergence is reported with
its position. Exit code 1 if there is one.

    python benchmarks/bit_identity.py --prompts 200 --new-tokens 128
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from workload import heldout, machine, write

import foredraft
from foredraft import LLM, SamplingParams


def divergence(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def decode(llm: LLM, prompts: list[Any], speculation: list[str], tokens: int) -> list[list[int]]:
    """speculation: the drafters that the prompts take in turn."""
    params = [
        SamplingParams(
            temperature=0,
            max_new_tokens=tokens,
            ignore_eos=True,
            speculation=speculation[i % len(speculation)],
        )
        for i in range(len(prompts))
    ]
    if llm.engine.rows.capacity > 1:
        return [o.token_ids for o in llm.generate(prompts, params)]
    return [llm.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]


def check(load: dict[str, Any], prompts: list[Any], tokens: int) -> dict[str, Any]:
    alone = foredraft.load(**load, max_batch=1)
    reference = decode(alone, prompts, ["none"], tokens)
    cases = {
        "draft-model, batch 1": (alone, ["draft-model"]),
        "lookup, batch 1": (alone, ["lookup"]),
    }
    eight = foredraft.load(**load, max_batch=8)
    cases |= {
        "plain, batch 8": (eight, ["none"]),
        "draft-model, batch 8": (eight, ["draft-model"]),
        "lookup, batch 8": (eight, ["lookup"]),
        "mixed, batch 8": (eight, ["draft-model", "lookup", "none"]),
    }
    result: dict[str, Any] = {"prompts": len(prompts), "tokens_each": tokens}
    for name, (llm, speculation) in cases.items():
        start = time.perf_counter()
        found = [
            divergence(a, b)
            for a, b in zip(reference, decode(llm, prompts, speculation, tokens), strict=True)
        ]
        diverged = {i: at for i, at in enumerate(found) if at is not None}
        result[name] = {"diverged": diverged, "seconds": round(time.perf_counter() - start, 1)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-draft", type=int, default=5)
    options = parser.parse_args()
    load = {"dtype": options.dtype, "device": "cpu", "max_draft": options.max_draft}
    result = {
        "what": vars(options),
        "machine": machine(),
        "demo": check(load, heldout(options.prompts), options.new_tokens),
    }
    result["identical"] = all(
        not case["diverged"] for case in result["demo"].values() if isinstance(case, dict)
    )
    write(f"bit_identity_{options.dtype}", result)
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
