"""A drafter is one file and one line of the table: with them, all that takes drafters takes it.

The file is `tests/support/phrases.py`, the line `tests/support/phrases_line.py`. The line has to be there before the
package is imported, so the checks and the suites run in a process of their own.
"""

from __future__ import annotations

import re

from tests.support.running import ROOT, python

CHECKS = "tests/support/phrases_checks.py"
CONFORMANCE = "tests/exactness/test_conformance.py"
ENUMERATION = "tests/exactness/test_enumeration.py"


def pytest_with_the_line(*arguments: str) -> dict[str, str]:
    """Run tests with the line, and return the outcome of each."""
    said = python(
        "-m", "pytest", "-p", "tests.support.phrases_line", "-p", "no:cacheprovider", "-n", "0", "-v", *arguments,
        cwd=ROOT,
    )  # fmt: skip
    return dict(re.findall(r"^\S+::(\S+) (\w+)", said, re.MULTILINE))


def test_everything_takes_a_drafter_of_one_file_and_one_line() -> None:
    found = pytest_with_the_line(CHECKS)
    assert {*found.values()} == {"PASSED"}
    assert {re.sub(r"\[.*", "", name) for name in found} >= {
        f"test_{who}_takes_it" for who in ("load", "info", "generate", "bench", "verify", "a_server")
    }


def test_the_suites_take_a_drafter_of_one_file_and_one_line() -> None:
    found = pytest_with_the_line(CONFORMANCE, "-k", "phrases")
    assert {*found.values()} == {"PASSED"} and len(found) == 4, found
    [(name, outcome)] = pytest_with_the_line(
        f"{ENUMERATION}::test_every_drafter_under_every_policy[fixed-2]"
    ).items()
    assert outcome == "PASSED", name
