"""What the verifying pass saves by resuming from the draft's hidden states, for drafter kangaroo.

Two figures on the demo target and on one padded with layers that add nothing, until a step takes 5 ms or
more: the verifying pass alone, and greedy decoding of held-out prompts, each with the states and without, in
turns. Outputs must be identical.

    python -m benchmarks.resuming
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.timing import Quiet, interleaved, spread, timed
from benchmarks.workload import fluent, machine, padded_demo, write
from foredraft import LLM, SamplingParams, demo
from foredraft.drafters.adapter import load_adapter
from foredraft.drafters.adapter_files import read_adapter
from foredraft.drafters.kangaroo import Kangaroo
from foredraft.model.runner import Resume
from foredraft.profiling.forwards import BareForwards

DRAFT, CONTEXT = 5, 200  # tokens of a draft, and before it
PADDED = 80  # layers of the longer target


def passes(llm: LLM, depth: int, repeats: int) -> dict[str, Any]:
    """Time the verifying pass of a draft with the states of all columns but the last, and without."""
    target = llm.loaded.runner
    bare = BareForwards(target, 1, CONTEXT, DRAFT + 1)
    states = target.decoder.embed(bare.tokens(DRAFT + 1))
    works = {
        "plain": bare.verify(1),
        "whole": bare.verify(DRAFT + 1),
        "resumed": bare.verify(DRAFT + 1, Resume(depth, states, [DRAFT])),
    }
    seconds = interleaved(works, torch.device("cpu"), repeats)
    ratios = [r / w for r, w in zip(seconds["resumed"], seconds["whole"], strict=True)]
    return {
        "plain_ms": spread([1e3 * s for s in seconds["plain"]]),
        "whole_ms": spread([1e3 * s for s in seconds["whole"]]),
        "resumed_over_whole": spread(ratios),
    }


def decoding(llm: LLM, repeats: int, new_tokens: int) -> dict[str, Any]:
    """Time greedy decoding with resuming and without, in turns."""
    prompts = fluent(llm, 4)
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, drafter="kangaroo")
    resume = Kangaroo.resume
    seconds: dict[str, list[float]] = {"resumed": [], "whole": []}
    texts: dict[str, Any] = {}

    def whole(own: Kangaroo) -> None:
        own._known.forget()

    def turn(at: int) -> dict[str, float]:
        totals = {}
        for side in list(seconds)[:: 1 if at % 2 else -1]:
            Kangaroo.resume = resume if side == "resumed" else whole  # type: ignore[method-assign, assignment]
            total = 0.0
            ids = []
            for prompt in prompts:
                took, outputs = timed(
                    lambda prompt=prompt: llm.generate([prompt], params), llm.loaded.engine.device
                )
                total += took
                ids.append(outputs[0].token_ids)
            texts[side], totals[side] = ids, total
        return totals

    turn(-1)
    quiet = Quiet(repeats)
    for at in range(repeats):
        for side, total in quiet.take(partial(turn, at)).items():
            seconds[side].append(total)
    Kangaroo.resume = resume  # type: ignore[method-assign]
    ratios = [r / w for r, w in zip(seconds["resumed"], seconds["whole"], strict=True)]
    return {"resumed_over_whole": spread(ratios), "identical": texts["resumed"] == texts["whole"]}


def measure(folder: Path, place: Path, repeats: int, new_tokens: int) -> dict[str, Any]:
    llm = foredraft.load(folder, drafter="none", policy="fixed", max_draft=DRAFT, max_batch=1)
    engine: Any = llm.loaded.engine
    config = read_adapter(place)
    drafter = Kangaroo(engine.target, engine.cache, load_adapter(place, config, engine.target))
    engine.drafters["kangaroo"] = drafter
    engine.rows.caches = list(dict.fromkeys([*engine.rows.caches, *drafter.caches]))
    return {
        "layers": llm.loaded.spec.layers,
        "depth": config.depth,
        "verifying": passes(llm, config.depth, repeats),
        "decoding": decoding(llm, repeats, new_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The saving of resumed verifying passes.")
    parser.add_argument(
        "--adapter", type=Path, default=demo.adapter_path(), help="of the demo target; default: the demo's"
    )
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of a text")
    given = parser.parse_args()
    results = {"demo": measure(demo.target_path(), given.adapter, given.repeats, given.new_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        padded = padded_demo(Path(folder) / "padded", PADDED)
        results["padded"] = measure(padded, given.adapter, given.repeats, given.new_tokens)
    write("resuming", {"machine": machine(), "results": results})


if __name__ == "__main__":
    main()
