"""Planted defects, each with a check that must fail under it.

A defect replaces a seam: a named function, method or property of the library. A *spoiler* takes the sound
function and returns the defective one, which calls it with other arguments or changes its result. Renames of
local names and moved lines leave such a defect as it is.

A defect that lies within a function is an edit of the function's source instead: the old text must occur there
once, or planting fails. Then plant it anew; do not drop it.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["Edit", "Mutant", "Spoiler", "assert_caught", "defect", "replaced", "spoil"]

Spoiler = Callable[[Callable[..., Any]], Callable[..., Any]]
Edit = (
    tuple[Any, Spoiler] | tuple[Any, str, str]
)  # a seam and its spoiler; or a function, its old text, the new


@dataclass(frozen=True)
class Mutant:
    """A planted defect.

    Attributes:
        name: What is wrong.
        edits: The edits that together make the defect.
        check: Passes without the defect and fails under it.
        raises: How the check fails.
    """

    name: str
    edits: tuple[Edit, ...]
    check: Callable[[], object]
    raises: type[Exception] | tuple[type[Exception], ...] = AssertionError

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for edit in self.edits:
            if len(edit) == 2:
                spoil(monkeypatch, *edit)
            else:
                function, old, new = edit
                plain = inspect.unwrap(function)
                monkeypatch.setattr(plain, "__code__", _edited(plain, old, new).__code__)


def defect(
    name: str,
    seam: Any,
    spoiler: Spoiler,
    check: Callable[[], object],
    raises: type[Exception] = AssertionError,
) -> Mutant:
    """Return the defect of one spoilt seam."""
    return Mutant(name, ((seam, spoiler),), check, raises)


def spoil(monkeypatch: pytest.MonkeyPatch, seam: Any, spoiler: Spoiler) -> None:
    """Replace a function, method, class method or property wherever the library or a test holds it."""
    sound = inspect.getattr_static(seam.__self__, seam.__name__) if inspect.ismethod(seam) else seam
    if isinstance(sound, property):
        assert sound.fget is not None
        spoilt: Any = property(spoiler(sound.fget))
    elif isinstance(sound, classmethod):
        spoilt = classmethod(spoiler(sound.__func__))
    else:
        spoilt = spoiler(sound)
    holders = list(_holders(sound))
    assert holders, f"{seam} is held nowhere"
    for holder, name in holders:
        monkeypatch.setattr(holder, name, spoilt)


def _holders(sound: object) -> Iterator[tuple[ModuleType | type, str]]:
    """Yield every module and class that holds the object, with the name there."""
    found: set[tuple[int, str]] = set()
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(("foredraft", "tests.")):
            continue
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for holder in (module, *classes):
            for name, value in vars(holder).items():
                if value is sound and (id(holder), name) not in found:
                    found.add((id(holder), name))
                    yield holder, name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an instance another attribute within the block, or hide a method of it."""
    own = getattr(owner, "__dict__", {})
    inherited = hasattr(owner, "__dict__") and name not in own
    sound = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, sound)


def _edited(function: FunctionType, old: str, new: str) -> FunctionType:
    """Return the function with its source edited, in one place."""
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
    """Check that the defect fails its check, in the way that the defect says: a crash proves little."""
    mutant.plant(monkeypatch)
    with pytest.raises(mutant.raises) as caught:
        mutant.check()
    assert "no longer holds" not in str(caught.value)
