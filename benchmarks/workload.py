"""What the scripts here share: held-out prompts, the machine, and the result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foredraft.bench.machine import machine
from foredraft.files import write_whole

__all__ = ["heldout", "machine", "write"]

HERE = Path(__file__).parent


def heldout(count: int, first: int = 0) -> list[str]:
    """Heads of functions from modules that the demo models were not trained on."""
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[first : first + count]]


def write(name: str, result: dict[str, Any]) -> None:
    """Beside, then renamed: a result file is whole or absent. Its content is also the last line printed."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n", "the result")
    print(json.dumps(result))
