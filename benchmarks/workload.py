"""What the benchmarks share: held-out prompts, the repetition measure, and the result file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import foredraft

HERE = Path(__file__).parent


def heldout(count: int) -> list[str]:
    """Heads of functions from modules that the demo models were not trained on."""
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before in the same text."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def machine() -> dict[str, Any]:
    model = "unknown"
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "foredraft": foredraft.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def write(name: str, result: dict[str, Any]) -> None:
    """Beside, then renamed: a result file is whole or absent. Its content is also the last line printed."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    beside.rename(path)
    print(json.dumps(result))
