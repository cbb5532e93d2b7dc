"""Two versions of Foredraft beside each other: the same requests, in turns, each version in its own process.

Both versions load the demo pair, the target perhaps with padding layers that change nothing (--layers), or
another model by itself (--model). The two processes decode each prompt in an order that alternates, and the
process that waits sleeps. With --rows so many prompts are decoded at once. The ratio is the old version's
seconds over the new one's, prompts included: 1.02 means that the new one is 2 % faster. The lists of tokens
must be equal.

    git worktree add ../before <commit>
    python -m benchmarks.versions --old ../before --layers 128
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contending import WORKER, Contender, answer

HERE = Path(__file__).resolve().parent
METHODS = "none,draft-model,layer-skip,lookup"


def work(options: dict[str, Any]) -> None:
    """Answer requests with their seconds and tokens, and an empty one with the package's folder."""
    from dataclasses import fields

    import torch

    import foredraft
    from foredraft import SamplingParams

    torch.set_num_threads(2)
    names = {field.name for field in fields(SamplingParams)}
    choice = "drafter" if "drafter" in names else "speculation"  # its earlier name
    llm = foredraft.load(
        options["model"], draft=options["draft"], plan=options["plan"], policy=options["policy"],
        max_draft=5 if options["policy"] == "fixed" else None,
        dtype="bfloat16", device="cpu", max_batch=options["rows"],
        max_length=1024,
    )  # fmt: skip

    def to(request: dict[str, Any] | None) -> Any:
        if request is None:
            return str(Path(foredraft.__file__).parent)
        params = SamplingParams(
            temperature=options["temperature"],
            seed=0,
            max_new_tokens=options["new_tokens"],
            ignore_eos=True,
            **{choice: request["method"]},
        )
        start = time.perf_counter()
        outputs = llm.generate(request["prompts"], params)
        return {
            "seconds": time.perf_counter() - start, "tokens": [output.token_ids for output in outputs],
        }  # fmt: skip

    answer(to)


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each method."""
    import foredraft
    from benchmarks.timing import Quiet, spread
    from benchmarks.workload import DEMO_LAYERS, demo_plan, fluent, padded_demo
    from foredraft import demo

    with TemporaryDirectory() as folder:
        model = str(demo.target_path())
        if options.layers > DEMO_LAYERS:
            model = str(padded_demo(Path(folder) / "target", options.layers))
        prompts = fluent(foredraft.load(options.model, drafter="none"), max(options.prompts, options.rows))
        batches = [
            [prompts[(at + row) % len(prompts)] for row in range(options.rows)]
            for at in range(options.prompts)
        ]
        loaded = {
            "model": model, "draft": str(demo.draft_path()), "plan": demo_plan(options.layers),
            "new_tokens": options.new_tokens, "policy": options.policy,
            "rows": options.rows, "temperature": options.temperature,
        }  # fmt: skip
        if options.model is not None:
            loaded |= {"model": options.model, "draft": None, "plan": None}
        trees = [Path(tree).resolve() / "src" for tree in (options.old, options.new)]
        old, new = (Contender("benchmarks.versions", loaded, tree) for tree in trees)
        assert old.ask(None) != new.ask(None), "both versions are of one package"
        seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
        same: dict[str, bool] = defaultdict(lambda: True)
        methods = options.methods.split(",")

        def pair(at: int, method: str, batch: list[list[int]]) -> tuple[float, float]:
            order = (old, new) if at % 2 else (new, old)
            done = {version: version.ask({"method": method, "prompts": batch}) for version in order}
            same[method] &= done[old]["tokens"] == done[new]["tokens"]
            return done[old]["seconds"], done[new]["seconds"]

        quiet = Quiet(options.repeats * len(batches) * len(methods))
        for turn in range(-1, options.repeats):
            for batch in batches:
                for method in methods:
                    if turn < 0:
                        pair(turn, method, batch)
                    else:
                        seconds[method].append(quiet.take(partial(pair, turn, method, batch)))
        for version in (old, new):
            version.close()
    return [
        {
            "method": method,
            "old_over_new": spread([before / after for before, after in pairs]),
            "overall": sum(before for before, _ in pairs) / sum(after for _, after in pairs),
            "new_seconds": spread([after for _, after in pairs]),
            "same_tokens": same[method],
        }
        for method, pairs in seconds.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--old", help="working tree of the old version; required")
    parser.add_argument("--new", default=str(HERE.parent), help="working tree of the new version")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="requests side by side")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10, help="turns, after a first one")
    parser.add_argument("--layers", type=int, help="of the target, padding included")
    parser.add_argument("--model", help="a checkpoint in place of the demo pair")
    parser.add_argument("--methods", default=METHODS, help="joined by commas")
    parser.add_argument("--policy", default="fixed", help="of both; fixed drafts 5 tokens")
    parser.add_argument("--name", default="versions")
    options = parser.parse_args(arguments)
    from benchmarks.workload import (  # not by the worker, whose package may be older
        DEMO_LAYERS,
        machine,
        write,
    )

    if options.old is None:
        parser.error("--old is required: the working tree of the old version")
    options.layers = options.layers or DEMO_LAYERS
    trees = {name: commit(vars(options)[name]) for name in ("old", "new")}
    rows = compare(options)
    write(options.name, {"what": vars(options) | trees, "machine": machine(), "methods": rows})
    if not all(row["same_tokens"] for row in rows):
        sys.exit("the versions decode different tokens")


def commit(tree: str | Path) -> str:
    """Return the commit of a working tree."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(json.loads(sys.argv[2]))
    else:
        main()
