"""What the scripts here share: held-out prompts, the machine, and the result file."""

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
WITHIN = 64  # tokens in which 4-grams are looked for that repeat


def heldout(count: int, first: int = 0) -> list[str]:
    """Heads of functions from modules that the demo models were not trained on."""
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[first : first + count]]


def fluent(llm: LLM, count: int, workload: str = "free") -> list[list[int]]:
    """Prompts of a workload that the target does not answer in circles, `count` at most."""
    plainly = SamplingParams(temperature=0, max_new_tokens=WITHIN, ignore_eos=True, drafter="none")
    kept: list[list[int]] = []
    for prompt in llm.encode(list(load_workloads((workload,))[0].prompts)):
        if len(kept) < count and repeated(llm.generate([prompt], plainly)[0].token_ids) < MAX_REPEATED:
            kept.append(prompt)
    return kept


def write(name: str, result: dict[str, Any]) -> None:
    """Beside, then renamed: a result file is whole or absent. Its content is also the last line printed."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n", "the result")
    print(json.dumps(result))
