"""Each planted defect is caught by its check, which passes without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mutants import CHECKS, MUTANTS

from planting import Mutant, assert_caught


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
