"""What is loaded is left out of garbage collection for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from foredraft.model.freed import collect_the_new


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Freeze everything again after a test, as `tests/conftest.py` does."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_is_there_is_left_out_until_the_end() -> None:
    with collect_the_new():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_a_program_froze_stays_frozen() -> None:
    gc.freeze()
    with collect_the_new():
        pass
    assert gc.get_freeze_count() > 1000
