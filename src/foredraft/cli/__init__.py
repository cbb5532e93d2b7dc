"""The command line: one module per command.

Results go to stdout; progress, warnings and errors go to stderr. A user error is one line that
begins with `foredraft: error: `. `exit_codes` lists the exit codes. No module imports PyTorch before a
command needs it, so that `--help` is quick. This file imports next to nothing: Ctrl-C is the program's own
matter from the first line of `main` on, and before that it is Python's, which prints a traceback.
"""

from __future__ import annotations

import os
import sys

from foredraft.cli.interrupt import end_at_once

TYPE_CHECKING = False  # what `typing` calls so; importing it takes longer than all of this file
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# How often a thread of PyTorch's operators (GNU OpenMP) looks for the others before it sleeps, some 0.2 ms.
# By default it looks 300,000 times after each operation: beside two busy processes on two cores, loading
# SmolLM2-135M took 28 s of CPU in this way rather than 7. PyTorch reads the variable when it is imported.
SPINS = "10000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: The command and its arguments. None takes those of the process, and Ctrl-C then ends the
            process. A program that gives arguments keeps its own handler of SIGINT.
    """
    if arguments is None:
        end_at_once()
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from foredraft.cli.commands import run

    return run(sys.argv[1:] if arguments is None else arguments)
