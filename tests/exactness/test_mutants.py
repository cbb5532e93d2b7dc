"""Each planted defect is caught by its check, which passes without it."""

from __future__ import annotations

from collections.abc import Callable

import mutants
import pass_mutants
import pytest
import transform_mutants

from planting import Mutant, assert_caught

CHECKS = mutants.CHECKS + transform_mutants.CHECKS + pass_mutants.CHECKS
MUTANTS = mutants.MUTANTS + transform_mutants.MUTANTS + pass_mutants.MUTANTS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


def test_what_is_no_defect_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    transform_mutants.HARMLESS.plant(monkeypatch)
    transform_mutants.HARMLESS.check()
