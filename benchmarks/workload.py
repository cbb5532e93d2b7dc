"""What the benchmarks share: held-out prompts, the machine, and the result file."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import foredraft

HERE = Path(__file__).parent


def heldout(count: int, first: int = 0) -> list[str]:
    """Heads of functions from modules that the demo models were not trained on."""
    lines = (HERE / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[first : first + count]]


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
