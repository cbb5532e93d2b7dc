"""Run the command line in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foredraft.cli.render import STAGES
from tests.support.running import environment, forked

COMMAND = [sys.executable, "-m", "foredraft.cli"]


def foredraft(
    *arguments: str, command: list[str] | None = None, input: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a forked process, or by a `command` or with options of `subprocess.run` in a new one."""
    if command is None and not options:
        return forked(_run_command, *arguments, input=input)
    if input:
        options["input"] = input
    return subprocess.run(
        [*(command or COMMAND), *arguments],
        **{"env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 120} | options,
    )


@contextmanager
def started_server(
    *options: str, under: Sequence[str] = (), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `foredraft serve` until the block ends, with the demo models if no option says otherwise.

    Yield the process, the address, and all that it said until it served. `under` is a program that runs the command line.
    """
    command = [*under, *COMMAND, "serve", "--port", "0", "--policy", "fixed", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(**variables))
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("print("):
                break
        address = re.search(r"foredraft serves \S+ at (http://127\.0\.0\.1:\d+) ", said)
        assert address, said
        reader.start()
        yield process, address[1], said
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()


PROGRESS = re.compile(
    rf"foredraft: ({'|'.join(re.escape(stage) for stage in STAGES.values())}|Texts|Choosing prompts"
    r"|Chi-square test \d+ of \d+|.*, (plain outputs|batch \d+(, warm-up)?))($|[ ,].*)"
)
BUSY = "foredraft: not all costs of this machine are known"


def without_progress(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not (PROGRESS.fullmatch(line) or line.startswith(BUSY))]


def _run_command(arguments: list[str]) -> None:
    from foredraft.cli import main

    sys.argv = ["foredraft", *arguments]
    sys.exit(main(arguments))
