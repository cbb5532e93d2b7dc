"""Compare the greedy output of every method with plain decoding, token by token.

Plain decoding of a prompt alone is the reference. The draft model and lookup must give the same token ids,
alone and at batch 8 with mixed methods in a batch. There are three targets: the demo pair on held-out code,
and random Llama and Gemma-2 checkpoints (grouped-query attention, a sliding window shorter than the text), on
which ties are common. The draft models of the random targets are the targets with noise on their weights. The
result file has the position of every divergence. Each CPU core runs a process with a share of the prompts.
The exit code is 1 if any output diverges.

    python -m benchmarks.bit_identity --prompts 200 --new-tokens 128
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import foredraft
from benchmarks.workload import heldout, machine, write
from foredraft import LLM, SamplingParams
from foredraft.bench.figures import divergence

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,  # a random tied head repeats one token for ever
    "initializer_range": 0.1,
}
RANDOM = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, SIZES),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {**SIZES, "sliding_window": 64}),
}


def save_random(folder: Path, family: str) -> dict[str, Any]:
    """Save a random target and a weak draft model of it; return the options of `foredraft.load` for them."""
    config, model_class, sizes = RANDOM[family]
    torch.manual_seed(0)
    model = model_class(config(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * weight.std().nan_to_num() * torch.randn_like(weight)
    model.save_pretrained(folder / "draft")
    return {"model": folder / "target", "draft": folder / "draft"}


def random_prompts(count: int) -> list[list[int]]:
    """Return random prompts of 1 to 300 tokens; each repeats its first half, so that lookup finds matches."""
    generator = random.Random(0)
    prompts: list[list[int]] = []
    for index in range(count):
        length = generator.choice((1, 3, 40, 63, 64, 65, 200, 256, 257, 300)) if index else 1
        half = [generator.randrange(3, SIZES["vocab_size"]) for _ in range((length + 1) // 2)]
        prompts.append((half + half)[:length])
    return prompts


def decode(llm: LLM, prompts: list[Any], drafters: list[str], tokens: int) -> list[list[int]]:
    """Decode the prompts greedily and return the new token ids; the drafters alternate over the prompts."""
    base = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    params = [SamplingParams(**base, drafter=drafters[i % len(drafters)]) for i in range(len(prompts))]
    if llm.loaded.engine.rows.capacity > 1:
        return [o.token_ids for o in llm.generate(prompts, params)]
    return [llm.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]


def check(prompts: list[Any], load: dict[str, Any], tokens: int) -> dict[str, dict[int, int]]:
    """Return, for each case, the position of the first divergence by index of the prompt."""
    torch.set_num_threads(1)
    alone, eight = (foredraft.load(**load, max_batch=rows) for rows in (1, 8))
    reference = decode(alone, prompts, ["none"], tokens)
    cases = {
        "draft-model, batch 1": (alone, ["draft-model"]),
        "lookup, batch 1": (alone, ["lookup"]),
        "plain, batch 8": (eight, ["none"]),
        "draft-model, batch 8": (eight, ["draft-model"]),
        "lookup, batch 8": (eight, ["lookup"]),
        "mixed, batch 8": (eight, ["draft-model", "lookup", "none"]),
    }
    diverged: dict[str, dict[int, int]] = {}
    for name, (llm, drafters) in cases.items():
        outputs = decode(llm, prompts, drafters, tokens)
        positions = [divergence(ids, expected) for ids, expected in zip(outputs, reference, strict=True)]
        diverged[name] = {i: position for i, position in enumerate(positions) if position is not None}
    return diverged


def check_all(prompts: list[Any], load: dict[str, Any], tokens: int, processes: int) -> dict[str, Any]:
    """Run `check` in several processes, each with a share of the prompts, and merge the results."""
    start = time.perf_counter()
    shares = [prompts[rank::processes] for rank in range(processes)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        parts = pool.map(partial(check, load=load, tokens=tokens), shares)
    result: dict[str, Any] = {"prompts": len(prompts), "tokens_each": tokens}
    result["diverged"] = {
        name: {
            i * processes + rank: position
            for rank, part in enumerate(parts)
            for i, position in part[name].items()
        }
        for name in parts[0]
    }
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-draft", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    result: dict[str, Any] = {"what": vars(options), "machine": machine()}
    load = {"dtype": options.dtype, "device": "cpu", "max_draft": options.max_draft, "policy": "fixed"}
    every = partial(check_all, tokens=options.new_tokens, processes=options.processes)
    with tempfile.TemporaryDirectory() as folder:
        for family in RANDOM:
            pair = save_random(Path(folder) / family, family)
            result[family] = every(random_prompts(options.prompts), load=load | pair)
    result["demo"] = every(heldout(options.prompts), load=load)
    targets = ("demo", *RANDOM)
    result["identical"] = not any(where for name in targets for where in result[name]["diverged"].values())
    write(f"bit_identity_{options.dtype}", result)
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
