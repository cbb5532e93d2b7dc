"""Each planted defect is caught by its check, which passes without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft import kernels
from tests.exactness import (
    commit_mutants,
    kangaroo_mutants,
    lossy_mutants,
    mutants,
    pass_mutants,
    sibling_mutants,
    skip_mutants,
    transform_mutants,
)
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.vocab_ops_choice import by_definition, by_kernels

MODULES = (
    mutants,
    commit_mutants,
    transform_mutants,
    pass_mutants,
    lossy_mutants,
    skip_mutants,
    kangaroo_mutants,
    sibling_mutants,
)
MUTANTS = [mutant for module in MODULES for mutant in module.MUTANTS]
CHECKS = {mutant.check: f"of {mutant.name}" for mutant in reversed(MUTANTS)}


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute vocabulary operations by PyTorch, where the defects are."""
    by_definition(monkeypatch)


@pytest.mark.usefixtures("defined")
@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.values())
def test_a_check_passes_without_defect(check: Callable[[], object]) -> None:
    check()


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.values())
def test_a_check_passes_with_the_kernels_and_without_defect(
    check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels(monkeypatch)
    check()


@pytest.mark.usefixtures("defined")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


@pytest.mark.usefixtures("defined")
def test_a_harmless_change_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    transform_mutants.HARMLESS.plant(monkeypatch)
    transform_mutants.HARMLESS.check()


def one() -> int:
    return 1


def check_one() -> None:
    try:
        value = one()
    except TypeError:
        value = 0  # the engine turns a crash into a failed request likewise
    assert value == 1


def test_a_defect_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    crashing = defect("a call with an argument too many", one, lambda sound: lambda: sound(0), check_one)
    with pytest.raises(AssertionError, match="the defect itself crashed"):
        assert_caught(crashing, monkeypatch)
