"""Held-out prompts, the machine's description and the result file, shared by the scripts of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams
from foredraft.bench.machine import machine
from foredraft.bench.options import MAX_REPEATED
from foredraft.bench.workload import load_workloads
from foredraft.files import write_whole
from foredraft.ngrams import repeated

__all__ = ["fluent", "heldout", "machine", "write"]

HERE = Path(__file__).parent
CHECKED_TOKENS = 64  # new tokens in which repeated 4-grams are counted: loops of a small model start earlier


def heldout(count: int, first: int = 0) -> list[str]:
    """Return `count` prompts from the `first` one on: heads of functions from held-out modules.

    The demo models were not trained on these modules.
    """
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[first : first + count]]


def fluent(llm: LLM, count: int, workload: str = "free") -> list[list[int]]:
    """Return up to `count` prompts of a workload, as token ids, on which plain decoding does not loop."""
    plain = SamplingParams(temperature=0, max_new_tokens=CHECKED_TOKENS, ignore_eos=True, drafter="none")
    kept: list[list[int]] = []
    for prompt in llm.encode(list(load_workloads((workload,))[0].prompts)):
        if len(kept) < count and repeated(llm.generate([prompt], plain)[0].token_ids) < MAX_REPEATED:
            kept.append(prompt)
    return kept


def write(name: str, result: dict[str, Any]) -> None:
    """Write a result file and print its content as one line of JSON. The file is never half-written."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n", "the result")
    print(json.dumps(result))
