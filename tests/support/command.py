"""Runs the command line as a person does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "foredraft.cli"]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    # One thread: the models are tiny, and the machine may be busy.
    return plain | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | changes


def foredraft(
    *arguments: str, command: list[str] = COMMAND, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        **{"env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 120} | options,
    )
