"""What `auto` makes of what a person adds: its time beside plain decoding, and beside `auto` without that.

A target decodes prompts of several kinds with nothing but what `load` finds by itself, and with one asset
added: a draft model of its own or of another tokenizer, a plan, an adapter, good ones and useless ones. All
contenders have models of their own and run at once, a slice of some rounds at a time in turns. A policy meets
its first request with measured costs and no other knowledge; the later ones follow. The figure is the seconds
with the asset over the least of plain decoding's and of `auto`'s without it: medians and quartiles, idle and
beside one busy process.

    python -m benchmarks.defaults --adapter --name defaults_demo
    python -m benchmarks.defaults --target SMOLLM2 --draft other-tokenizer=GEMMA --draft same=SMALL \\
        --plan exit:8 --adapter --name defaults_smollm2

`--adapter` adds one whose weights are noise; the target is then a folder. Without --target, it is the demo's.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import foredraft
from benchmarks.auto import Contender, Running
from benchmarks.neighbours import busy
from benchmarks.timing import spread
from benchmarks.workload import heldout, machine, write
from foredraft import LLM, SamplingParams, demo
from foredraft.decode.policy import Auto

SLICE = 0.03  # seconds that a contender gets at a time
POSITIONS = 1024
REQUESTS = 3  # of each prompt, by one policy; the first is the policy's first
CHAT = "Explain in a few paragraphs why the sky is blue, and why sunsets are red."


def prompts_of(llm: LLM) -> dict[str, list[int]]:
    """Return a prompt of every kind, as token ids."""
    draw, words = random.Random(1), llm.loaded.engine.vocabulary
    return {
        "code": llm.encode(heldout(1))[0],
        "chat": llm.encode([CHAT])[0],
        "random ids": [draw.randrange(words // 2) for _ in range(40)],
        "repetition": llm.encode(["one two three four five six seven eight nine ten " * 6])[0],
    }


def loaded(options: argparse.Namespace, folder: Path) -> dict[str, LLM]:
    """Return the models of all contenders, by name."""
    target = options.target or str(demo.target_path())
    common: dict[str, Any] = {"device": "cpu", "max_batch": 1, "max_length": POSITIONS}
    found = {
        "plain": foredraft.load(target, **common, drafter="none"),
        "auto": foredraft.load(target, **common),
    }
    drafts = options.draft if options.target else [f"demo={demo.draft_path()}", *options.draft]
    for name, draft in (each.split("=", 1) for each in drafts):
        found[f"draft, {name}"] = foredraft.load(target, draft=draft, **common)
    for plan in options.plan:
        found[f"plan, {plan}"] = foredraft.load(target, plan=plan, **common)
    if options.adapter:
        from tests.support.adapters import save_adapter

        adapter = save_adapter(Path(target), folder / "adapter", noise=10.0)
        found["adapter, noise"] = foredraft.load(target, adapter=str(adapter), **common)
    return found


def fresh(llm: LLM) -> Any:
    """Return the model's policy as it is before the first request."""
    own = llm.loaded.engine.policy
    return Auto(own.max_draft, own.greedy, own.sampled) if isinstance(own, Auto) and own.measured else own


def run(models: dict[str, LLM], options: argparse.Namespace, seconds: Any, same: dict[str, bool]) -> None:
    """Let all contenders decode every prompt, some requests after each other."""
    params = SamplingParams(temperature=0, max_new_tokens=options.new_tokens, ignore_eos=True)
    chance, which = random.Random(0), {name: "none" if name == "plain" else "auto" for name in models}
    for kind, prompt in prompts_of(models["plain"]).items():
        policies = {name: fresh(llm) for name, llm in models.items()}
        for request in range(REQUESTS):
            running = {
                name: Running(Contender(llm, partial(policies.get, name), which[name]), [prompt], params)
                for name, llm in models.items()
            }
            order = list(running.values())
            while order:
                chance.shuffle(order)
                for each in order:
                    each.go_on(SLICE)
                order = [each for each in order if not each.done]
            plain = running["plain"].outputs()[0].token_ids
            for name, each in running.items():
                same[name] &= each.outputs()[0].token_ids == plain
                seconds[kind, "first" if request == 0 else "later"][name].append(each.seconds)


def figures(seconds: dict[tuple[str, str], dict[str, list[float]]], name: str) -> dict[str, Any]:
    """Return an asset's seconds over the best without it: by first and later requests, and by prompts."""
    found: dict[str, Any] = {}
    for when in ("first", "later"):
        by_prompt: dict[str, list[float]] = {}
        for (kind, which), by_name in seconds.items():
            if which == when:
                best = [min(pair) for pair in zip(by_name["plain"], by_name["auto"], strict=True)]
                by_prompt[kind] = [own / least for own, least in zip(by_name[name], best, strict=True)]
        found[when] = {kind: spread(ratios) for kind, ratios in by_prompt.items()}
        found[when]["all"] = spread([ratio for ratios in by_prompt.values() for ratio in ratios])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", help="checkpoint or GGUF file; without one, the demo target")
    parser.add_argument("--draft", action="append", default=[], help="a name for it, '=', and a model")
    parser.add_argument("--plan", action="append", default=[])
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--loads", default="0,1", help="busy processes beside")
    parser.add_argument("--name", default="defaults")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"what": dict(vars(options)), "machine": machine(), "loads": {}}
    with torch.inference_mode(), TemporaryDirectory() as folder:
        models = loaded(options, Path(folder))
        for processes in map(int, options.loads.split(",")):
            seconds: Any = defaultdict(lambda: defaultdict(list))
            same: dict[str, bool] = defaultdict(lambda: True)
            with busy(processes):
                for _ in range(options.repeats):
                    run(models, options, seconds, same)
            result["loads"][f"{processes} busy"] = {
                name: {"identical_to_plain": same[name], **figures(seconds, name)} for name in models
            }
    write(options.name, result)


if __name__ == "__main__":
    main()
