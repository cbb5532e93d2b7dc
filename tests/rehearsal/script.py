"""Run a module of the project on the pretended device: `python -m tests.rehearsal.script benchmarks.gpu --shape tiny`.

`foredraft verify --device cuda` is `python -m tests.rehearsal.script foredraft verify --device cuda`.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.rehearsal.guard import GUARD  # before torch

# isort: split
from tests.rehearsal.ledger import LEDGER
from tests.rehearsal.pretending import pretend


def main() -> None:
    assert GUARD is not None
    pretend()
    os.environ["PYTEST_ADDOPTS"] = "-p tests.rehearsal.plugin"  # for tests that the module runs
    module, sys.argv = sys.argv[1], sys.argv[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        print(LEDGER.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
