"""Held-out prompts, the machine's description and the result file, shared by the scripts of this folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from shutil import copytree
from typing import Any

from safetensors.torch import load_file, save_file

from foredraft import LLM, SamplingParams, demo
from foredraft.bench.bench_records import MAX_REPEATED
from foredraft.bench.machine_record import machine
from foredraft.bench.workload import load_workloads
from foredraft.drafters.lookup import repeated
from foredraft.files import write_whole

__all__ = ["DEMO_LAYERS", "demo_plan", "fluent", "heldout", "machine", "padded_demo", "write"]

HERE = Path(__file__).parent
STARTED = time.perf_counter()
DEMO_LAYERS = 16
CHECKED_TOKENS = 64  # new tokens in which repeated 4-grams are counted: loops of a small model start earlier


def heldout(count: int) -> list[str]:
    """Return so many heads of functions, from modules that the demo models never saw."""
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def fluent(llm: LLM, count: int, workload: str = "free") -> list[list[int]]:
    """Return up to `count` prompts of a workload, as token ids, on which plain decoding does not loop."""
    plain = SamplingParams(temperature=0, max_new_tokens=CHECKED_TOKENS, ignore_eos=True, drafter="none")
    kept: list[list[int]] = []
    for prompt in llm.encode(list(load_workloads((workload,))[0].prompts)):
        if len(kept) < count and repeated(llm.generate([prompt], plain)[0].token_ids) < MAX_REPEATED:
            kept.append(prompt)
    return kept


def demo_plan(layers: int) -> str:
    """Return a plan that `foredraft tune` found for the demo target, which also skips all padding layers."""
    more = f",{DEMO_LAYERS}-{layers - 1}" if layers > DEMO_LAYERS else ""
    return f"skip:attn=1-3,5-7,9-11,13-15{more}/mlp=1-7,9-11,13-15{more}"


def padded_demo(folder: Path, layers: int, positions: int | None = None) -> Path:
    """Write the demo target with layers that change nothing added, so that a step takes longer; return it.

    `positions` allows longer texts than the model was trained for.
    """
    return padded(demo.target_path(), folder, layers, positions)


def padded(source: Path, folder: Path, layers: int, positions: int | None = None) -> Path:
    """Write a model as `padded_demo` does: added layers are like its own in turn, with outputs of zero.

    So every logit stays the same bit for bit.
    """
    copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    first, config["num_hidden_layers"] = config["num_hidden_layers"], layers
    config["max_position_embeddings"] = positions or config["max_position_embeddings"]
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer % first] for layer in range(layers)]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    for layer in range(first, layers):
        own = f"model.layers.{layer % first}."
        for name in [name for name in weights if name.startswith(own)]:
            added = weights[name].clone()
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                added.zero_()
            weights[name.replace(own, f"model.layers.{layer}.")] = added
    save_file(weights, file, {"format": "pt"})
    return folder


def write(name: str, result: dict[str, Any]) -> None:
    """Write a result file, which also says how long this script has run, and print it as one line of JSON."""
    result = {**result, "script_seconds": round(time.perf_counter() - STARTED)}
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n", "the result")
    print(json.dumps(result))
