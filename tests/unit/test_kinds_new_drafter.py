"""A drafter is one file and one line of the table: with them, all that takes drafters takes it.

The file is `tests/support/phrases.py`, the line `tests/support/phrases_line.py`. The line has to be there before the
package is imported, so the checks and the suites run in a process of their own.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.running import ROOT, environment

CHECKS = "tests/support/phrases_checks.py"
CONFORMANCE = "tests/exactness/test_conformance.py"
ENUMERATION = "tests/exactness/test_enumeration.py::test_every_drafter_under_every_policy[fixed-2]"

pytestmark = pytest.mark.timeout(900)  # many tests as one


def outcomes_with_the_line(*arguments: str) -> dict[tuple[str, str], str]:
    """Run tests in a process whose table has the line; return the outcome of each by file and name."""
    options = "-p tests.support.phrases_line -p no:cacheprovider -n 0 -v --cases all".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        env=environment(), capture_output=True, encoding="utf-8", timeout=800, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = re.findall(r"^(\S+?)::(\S+) ([A-Z]+)", done.stdout, re.MULTILINE)
    return {(file, name): outcome for file, name, outcome in lines}


@pytest.mark.heavy
def test_everything_takes_a_drafter_of_one_file_and_one_line() -> None:
    found = outcomes_with_the_line(CHECKS, CONFORMANCE, ENUMERATION, "-k", "phrases or every_policy")
    assert {*found.values()} == {"PASSED"}
    assert {re.sub(r"\[.*", "", name) for file, name in found if file == CHECKS} >= {
        f"test_{taker}_takes_it" for taker in ("load", "info", "generate", "bench", "verify", "a_server")
    }
    assert len([name for file, name in found if file == CONFORMANCE]) == 4
    assert tuple(ENUMERATION.split("::")) in found
