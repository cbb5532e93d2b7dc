"""Run the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "foredraft.cli"]


def environment(**changes: str) -> dict[str, str]:
    """Return an environment with this tree's source, without colour settings, and with these changes."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    # One thread, because the models are tiny and the machine may be busy.
    return inherited | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | changes


def foredraft(
    *arguments: str, command: list[str] = COMMAND, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        *arguments: Arguments of the command line.
        command: The program and its first arguments.
        **options: Options of `subprocess.run` that replace the defaults.
    """
    return subprocess.run(
        [*command, *arguments],
        **{"env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 120} | options,
    )
