"""Planted defects, each with a check that must fail under it.

A defect replaces a seam: a named function, method or property of the library. A *spoiler* takes the sound
function and returns the defective one, which calls it with other arguments or changes its result. Renames of
local names and moved lines leave such a defect as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["Edit", "Mutant", "Spoiler", "assert_caught", "defect", "replaced", "spoil"]

Spoiler = Callable[[Callable[..., Any]], Callable[..., Any]]
Edit = tuple[Any, Spoiler]  # a seam and its spoiler


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

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
        """Plant the edits; returns a list that gathers the crashes of the defective functions."""
        crashes: list[Exception] = []
        for seam, spoiler in self.edits:
            spoil(monkeypatch, seam, lambda sound, spoiler=spoiler: _watched(spoiler(sound), crashes))
        return crashes


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
    """Replace a function, any method or a property wherever the library or a test holds it."""
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
        static = isinstance(vars(holder)[name], staticmethod)
        monkeypatch.setattr(holder, name, staticmethod(spoilt) if static else spoilt)


def _holders(sound: object) -> Iterator[tuple[ModuleType | type, str]]:
    """Yield every module and class that holds the object, or a static method of it, with the name there."""
    found: set[tuple[int, str]] = set()
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(("foredraft", "tests.")):
            continue
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for holder in (module, *classes):
            for name, value in vars(holder).items():
                held = value.__func__ if isinstance(value, staticmethod) else value
                if held is sound and (id(holder), name) not in found:
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


def _watched(spoilt: Any, crashes: list[Exception]) -> Any:
    """Note when a defective function itself crashes; the library may turn that into a failed request."""
    if not isinstance(spoilt, FunctionType):
        return spoilt

    @functools.wraps(spoilt)
    def watched(*given: Any, **named: Any) -> Any:
        try:
            return spoilt(*given, **named)
        except (AttributeError, NameError, TypeError) as crash:
            crashes.append(crash)
            raise

    return watched


def assert_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the defect fails its check in the way that the defect says, and not because it crashed."""
    crashes = mutant.plant(monkeypatch)
    with pytest.raises(mutant.raises):
        mutant.check()
    unexpected = [crash for crash in crashes if not isinstance(crash, mutant.raises)]
    assert not unexpected, f"the defect itself crashed: {unexpected[0]!r}"
