"""Run the command line in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from foredraft.cli.progress import STAGES
from tests.support.running import environment, forked

COMMAND = [sys.executable, "-m", "foredraft.cli"]


def foredraft(
    *arguments: str, command: list[str] | None = None, input: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        *arguments: Arguments of the command line.
        command: The program and its first arguments, if not the command line as it is.
        input: Standard input.
        **options: Further options of `subprocess.run`. With a program or an option the process is a new one, and
            otherwise a forked one.
    """
    if command is None and not options:
        return forked(_run_command, *arguments, input=input)
    if input:
        options["input"] = input
    return subprocess.run(
        [*(command or COMMAND), *arguments],
        **{"env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 120} | options,
    )


PROGRESS = re.compile(
    rf"foredraft: ({'|'.join(re.escape(stage) for stage in STAGES.values())}|Texts|Choosing prompts"
    r"|Chi-square test \d+ of \d+|.*, (plain outputs|batch \d+(, warm-up)?))($|[ ,].*)"
)
BUSY = "foredraft: not all costs of this machine are known"


def without_progress(stderr: str) -> list[str]:
    """Return the lines of stderr that neither report progress nor that this machine was busy."""
    return [line for line in stderr.splitlines() if not (PROGRESS.fullmatch(line) or line.startswith(BUSY))]


def _run_command(arguments: list[str]) -> None:
    from foredraft.cli import main

    sys.argv = ["foredraft", *arguments]
    sys.exit(main(arguments))
