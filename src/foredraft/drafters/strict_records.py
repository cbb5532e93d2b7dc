"""Strict records: dataclasses that are kept as JSON objects, and read with every field checked.

Every field must be present, of its type and within its bounds, and no other field may be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from foredraft.errors import ConfigError, shortened
from foredraft.files import is_no_file
from foredraft.model.config import MAX_FLOAT, parse_json
from foredraft.user_cache import PRIVATE_CACHE, NotPrivateError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Bound", "Record", "is_date"]

Bound: TypeAlias = tuple[Callable[[Any], bool], str]  # test of a value; the accepted values, for messages


T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Record:
    """How one kind of record is read.

    Attributes:
        option: The option whose value the file is, for messages.
        remedy: What to do about a file that is no such record.
        anew: What to do about a record of another version.
        bounds: By field.
        absent: Values of fields that old files lack.
    """

    option: str
    remedy: str
    anew: str
    bounds: Mapping[str, Bound]
    absent: Mapping[str, Any] = field(default_factory=dict)

    def read(self, kind: type[T], file: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> T:
        """Return the record in a file.

        Args:
            kind: The dataclass; the default of its field `format` is the version that this program reads.
            file: The file.
            read: Returns the content of a file.

        Raises:
            ConfigError: The file cannot be read, or is not such a record.
        """
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
        types = {each.name: str(each.type) for each in fields(kind)}
        version = next(each.default for each in fields(kind) if each.name == "format")
        if found.get("format") != version:
            raise self.refused(
                file,
                f"whose format is {shortened(found.get('format'))}, but this version reads format {version}",
                self.anew,
            )
        found = {**self.absent, **found}
        for name, type_ in types.items():
            if name not in found or not _is(found[name], type_):
                value = shortened(found[name]) if name in found else "missing"
                raise self.refused(file, f"whose {name} is {value}, not {_WORDS[type_]}")
        if unknown := sorted(found.keys() - types.keys()):
            raise self.refused(file, f"which has the unknown field {shortened(unknown[0])}")
        made = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()})
        for name, (fits, words) in self.bounds.items():
            if not fits(getattr(made, name)):
                raise self.refused(file, f"whose {name} is {shortened(found[name])}, not {words}")
        return made

    def refused(self, file: Path, problem: str, remedy: str | None = None) -> ConfigError:
        """Return the error of a file."""
        return ConfigError(problem, option=self.option, value=str(file), remedy=remedy or self.remedy)


# Annotation of a field -> the JSON values that it accepts, for messages.
_WORDS = {
    "str": "a string",
    "int": "a whole number of 1 or more",
    "float": "a finite number",
    "int | None": "a whole number or null",
    "float | None": "a finite number or null",
    "str | None": "a string or null",
    "tuple[int, ...]": "a list of whole numbers",
}


def _is(value: Any, type_: str) -> bool:
    match type_:
        case "str":
            return isinstance(value, str)
        case "int":
            return type(value) is int and value >= 1
        case "float":
            return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT
        case "float | None":
            return value is None or _is(value, "float")
        case "int | None":
            return value is None or type(value) is int
        case "str | None":
            return value is None or _is(value, "str")
        case _:
            return isinstance(value, list) and all(type(each) is int for each in value)


def is_date(text: str) -> bool:
    """Return whether a text is a date as YYYY-MM-DD."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
