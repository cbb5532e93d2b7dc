"""The command line: a module for a command, or for two that are alike.

Results go to stdout; progress, warnings and errors go to stderr. No module imports PyTorch before a command
needs it, and this file next to nothing: from the first line of `main` on, Ctrl-C is the program's own matter.
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
# Objects made between two collections of garbage. What a command imports stays: to walk over it again after
# each 700 objects, as Python does by default, and once more at the end, takes a fifth of `foredraft info`.
COLLECTED_AFTER = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        end_at_once()
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        import atexit
        import gc

        gc.set_threshold(COLLECTED_AFTER)
        atexit.register(gc.freeze)
    from foredraft.cli.commands import run

    return run(sys.argv[1:] if arguments is None else arguments)
