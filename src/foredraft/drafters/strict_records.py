"""Strict records: dataclasses that are kept as JSON objects, and read with every field checked.

Every field must be of its annotated type, and no other field may be there; `StrictRecord` reads a file, in
which every field must be present and within its bounds, too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from foredraft.errors import ConfigError, shortened
from foredraft.files import is_no_file
from foredraft.model.config import MAX_FLOAT, parse_json
from foredraft.user_cache import PRIVATE_CACHE, NotPrivateError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Bound = tuple[Callable[[Any], bool], str]  # test of a value; the accepted values, for messages
Count = Annotated[int, "of 1 or more"]  # of a field whose whole number is at least 1
T = TypeVar("T", bound="DataclassInstance")


MAX_LAYERS, MAX_DRAFT = 10_000, 1_000  # upper bounds, far above any model and any draft that pays
ABOVE_0: Bound = (lambda value: value > 0, "above 0")


class FieldError(TypeError):
    """A field of a record is missing, unknown or of another type: a relative clause says which."""


def as_record(kind: type[T], found: Mapping[str, Any], *, defaults: bool = True) -> T:
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for each in fields(kind):
        name, hint = each.name, hints[each.name]
        if name in found:
            try:
                values[name] = _read(found[name], hint)
            except ValueError:
                raise FieldError(f"whose {name} is {shortened(found[name])}, not {_words(hint)}") from None
        elif not defaults or (each.default is MISSING and each.default_factory is MISSING):
            raise FieldError(f"whose {name} is missing, not {_words(hint)}")
    if unknown := sorted(found.keys() - hints.keys()):
        raise FieldError(f"which has the unknown field {shortened(unknown[0])}")
    return kind(**values)


@dataclass(frozen=True, slots=True)
class StrictRecord:
    """How one kind of record is read."""

    option: str  # the option whose value the file is, for messages
    remedy: str  # what to do about a file that is no such record
    anew: str  # what to do about a record of another version
    bounds: Mapping[str, Bound]  # by field
    absent: Mapping[str, Any] = field(default_factory=dict)  # values of fields that old files lack

    def read(self, kind: type[T], file: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> T:
        if is_no_file(file):
            raise self.refused(file, "which is no file")
        try:
            found = parse_json(read(file).decode())
        except NotPrivateError as error:
            problem = f"which is not used, because {error.filename} {error.strerror}"
            raise self.refused(file, problem, PRIVATE_CACHE) from error
        except OSError as error:
            raise self.refused(file, f"which cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise self.refused(file, f"which is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise self.refused(file, "which holds no JSON object")
        version = next(each.default for each in fields(kind) if each.name == "format")
        if (format := found.get("format")) != version:
            problem = f"whose format is {shortened(format)}, but this version reads format {version}"
            raise self.refused(file, problem, self.anew)
        found = {**self.absent, **found}
        try:
            made = as_record(kind, found, defaults=False)
        except FieldError as error:
            raise self.refused(file, str(error)) from error
        for name, (fits, words) in self.bounds.items():
            if not fits(getattr(made, name)):
                raise self.refused(file, f"whose {name} is {shortened(found[name])}, not {words}")
        return made

    def refused(self, file: Path, problem: str, remedy: str | None = None) -> ConfigError:
        return ConfigError(problem, option=self.option, value=str(file), remedy=remedy or self.remedy)


def _read(value: Any, hint: Any) -> Any:
    """Return a value as its annotation has it: lists become tuples, objects become records.

    ValueError: it is not of that type.
    """
    if hint is Any:
        return value
    if get_origin(hint) in (Union, types.UnionType):
        return None if value is None else _read(value, _without_none(hint))
    if isinstance(value, list | tuple) and get_origin(hint) is tuple:
        return tuple(_read(each, get_args(hint)[0]) for each in value)
    if isinstance(value, dict) and get_origin(hint) is dict:
        return {key: _read(each, get_args(hint)[1]) for key, each in value.items()}
    if isinstance(value, dict) and isinstance(hint, type) and is_dataclass(hint):
        return as_record(hint, value)
    if _is(value, hint):
        return value
    raise ValueError


def _is(value: Any, hint: Any) -> bool:
    """Return whether a value is of the type of one text, flag or number."""
    if hint == Count:
        return type(value) is int and value >= 1
    if hint is float:
        return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT
    return hint in (str, bool, int) and type(value) is hint


NAMED: dict[Any, str] = {
    str: "a string", bool: "true or false", int: "a whole number", float: "a finite number",
    Count: "a whole number of 1 or more",
}  # fmt: skip


def _words(hint: Any) -> str:
    """Return the values that an annotation accepts, for messages."""
    if get_origin(hint) in (Union, types.UnionType):
        return f"{_words(_without_none(hint))} or null"
    if get_origin(hint) is tuple:
        return "a list of whole numbers" if get_args(hint)[0] is int else "a list"
    return NAMED.get(hint, "an object")


def _without_none(hint: Any) -> Any:
    [kind] = (each for each in get_args(hint) if each is not types.NoneType)
    return kind


def is_date(text: str) -> bool:
    """Return whether a text is a date as YYYY-MM-DD."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


# of the fields that plans and adapters have both
MEASURED: dict[str, Bound] = {
    "layers": (lambda layers: layers <= MAX_LAYERS, f"{MAX_LAYERS} or less"),
    "max_draft": (lambda draft: draft <= MAX_DRAFT, f"{MAX_DRAFT} or less"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "from 0 to 1"),
    "tau": (lambda tau: tau >= 1, "1 or more"),
    "predicted": ABOVE_0,
    "date": (is_date, "a date as YYYY-MM-DD"),
    "temperature": (lambda temperature: temperature is None or temperature >= 0, "0 or more"),
}
