"""Planted defects: an edit of a function's source, compiled into the function in place.

Every name that was imported from anywhere then runs the defect. Where the library's code has changed under
a defect, planting fails: plant it anew, do not drop it.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

Edit = tuple[Any, str, str]


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    check: Callable[[], object]
    raises: type[Exception] = AssertionError

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for function, old, new in self.edits:
            plain = inspect.unwrap(function)
            monkeypatch.setattr(plain, "__code__", _edited(plain, old, new).__code__)


def _edited(function: FunctionType, old: str, new: str) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} no longer holds {old!r}"
    tree = ast.parse(source.replace(old, new))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    made: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, f"<mutant of {function.__qualname__}>", "exec", flags), function.__globals__, made)
    compiled: FunctionType = made[definition.name]
    return compiled


def assert_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check must fail under the defect, and by saying so: a crash proves little."""
    mutant.plant(monkeypatch)
    with pytest.raises(mutant.raises) as caught:
        mutant.check()
    assert "no longer holds" not in str(caught.value)
