"""Who decides over a vocabulary, in a test: the definition or the kernels, whichever of them an engine was given."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.decode.operators import DEFINITION, Definition, Operators
from foredraft.kernels import library
from foredraft.kernels.rows import RowKernels

METHODS = [name for name in vars(Operators) if not name.startswith("_")]
PRESENT: Operators = (
    DEFINITION if library() is None else RowKernels()
)  # what serves where there is a compiler


def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the defects of tests are, but for those of the kernels."""
    for name in METHODS:
        monkeypatch.setattr(RowKernels, name, getattr(Definition, name))


def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = RowKernels()

    def stand_in(name: str) -> Any:
        run = getattr(kernels, name)
        return lambda self, *given: run(*given)

    for name in METHODS:
        monkeypatch.setattr(Definition, name, stand_in(name))
