"""Threads of PyTorch's operators sleep soon where they wait: the command line says so to OpenMP before it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foredraft.cli import SPINS
from tests.support.running import environment

PROGRAM = (
    "import os, sys; from foredraft.cli import main; code = main(); "
    "print(code, os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["by default", "as a user says", "a policy of the user's"],
)
def test_the_command_line_bounds_how_long_operators_spin(given: dict[str, str], spins: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--version"],
        env=environment(**given),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert run.stdout.splitlines()[-1] == f"0 {spins} False", run.stderr
