"""Mutation testing: planted defects, each with a check that must fail under it.

A defect replaces an injection point: a named function, method or property of the library. A mutation takes
the sound function and returns the defective one. Renamed locals and moved lines leave a defect as it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest

Mutation = Callable[[Callable[..., Any]], Callable[..., Any]]
Edit = tuple[Any, Mutation]  # an injection point and its mutation


@dataclass(frozen=True)
class Mutant:
    name: str  # what is wrong
    edits: tuple[Edit, ...]  # which together make the defect
    check: Callable[[], object]  # passes without the defect and fails under it
    raises: type[Exception] | tuple[type[Exception], ...] = AssertionError  # how the check fails

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
        crashes: list[Exception] = []
        for point, mutation in self.edits:
            mutate(monkeypatch, point, lambda sound, mutation=mutation: _watched(mutation(sound), crashes))
        return crashes


def defect(
    name: str, point: Any, mutation: Mutation, check: Callable[[], object], raises: Any = AssertionError
) -> Mutant:
    return Mutant(name, ((point, mutation),), check, raises)


def caught_by(*tables: Mapping[Callable[[], object], Sequence[tuple[Any, ...]]]) -> list[Mutant]:
    """Return the defects that each check of the tables must catch.

    Entries: name, injection point, mutation (or name, edits); then how the check fails unless by an assertion.
    """
    found = []
    for check, defects in itertools.chain(*(table.items() for table in tables)):
        for name, *what in defects:
            edits, *raises = what if isinstance(what[0], tuple) else [((what[0], what[1]),), *what[2:]]
            found.append(Mutant(name, edits, check, *raises))
    return found


def mutate(monkeypatch: pytest.MonkeyPatch, point: Any, mutation: Mutation) -> None:
    """Replace a function, any method or a property wherever the library or a test holds it."""
    sound = inspect.getattr_static(point.__self__, point.__name__) if inspect.ismethod(point) else point
    if isinstance(sound, property):
        mutated: Any = property(mutation(sound.fget))
    elif isinstance(sound, classmethod):
        mutated = classmethod(mutation(sound.__func__))
    else:
        mutated = mutation(sound)
    holders = list(_holders(sound))
    assert holders, f"{point} is held nowhere"
    for holder, name in holders:
        static = isinstance(vars(holder)[name], staticmethod)
        monkeypatch.setattr(holder, name, staticmethod(mutated) if static else mutated)


def _holders(sound: object) -> Iterator[tuple[ModuleType | type, str]]:
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


def _watched(mutated: Any, crashes: list[Exception]) -> Any:
    if not isinstance(mutated, FunctionType):
        return mutated

    @functools.wraps(mutated)
    def watched(*given: Any, **named: Any) -> Any:
        try:
            return mutated(*given, **named)
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
