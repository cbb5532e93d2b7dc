"""Checking: values against JSON schemas, by the library jsonschema, for what no grammar holds.

https://python-jsonschema.readthedocs.io. Schemas and values come from strangers, so the work of a check is
bounded: it looks at a number of keywords, runs no regular expression (Python's may take exponential time),
and fetches nothing. What it cannot find out within these bounds passes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

from foredraft.serve.schemas.tree import Path, Schema, changed, schemas_in, shown

__all__ = ["broken", "fault"]

MOST = 5_000  # keywords that a check looks at: some 0.1 s
MOST_TOLD = 20  # faults of one value
MOST_SHOWN = 200  # characters of a fault

Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class _TooMuch(Exception):
    """A check has looked at too many keywords."""


class _Work(threading.local):
    """How many further keywords the check of this thread may look at."""

    left = MOST


_work = _Work()


def fault(schema: Schema) -> str | None:
    """Return why a schema is no JSON schema of any draft, with the place; None where it is one."""
    from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

    faults = []
    for draft in dict.fromkeys((_draft(schema), Draft202012Validator, Draft7Validator, Draft4Validator)):
        try:
            draft.check_schema(schema, format_checker=None)  # a pattern need not be one of Python's
        except SchemaError as error:
            faults.append(f"{shown(tuple(error.absolute_path))}: {error.message[:MOST_SHOWN]}")
        else:
            return None
    return faults[0]


def broken(schema: Schema, text: str) -> list[str]:
    """Return the places of the keywords that a text of JSON breaks; [] where it is none, such as a cut one.

    Args:
        schema: A valid schema.
        text: The text.
    """
    from referencing import Registry

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    _work.left = MOST
    found: list[str] = []
    try:
        draft = _draft(schema)
        checked = _without_patterns(schema, (), further=not _has_patterns(schema))
        validator = _bounded(draft)(checked, registry=Registry(), format_checker=draft.FORMAT_CHECKER)
        for error in validator.iter_errors(value):
            found.append(shown(tuple(error.absolute_schema_path)))
            if len(found) == MOST_TOLD:
                break
    except Exception:  # too much work, a reference to elsewhere, or what else a stranger's schema leads to
        return found
    return found


def _draft(schema: Schema) -> Any:
    """Return the validator of the draft that a schema states; of 2020-12 where it states none."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    return validator_for(schema, default=Draft202012Validator)


@cache
def _bounded(draft: Any) -> Any:
    """Return the validator of a draft with bounded work."""
    from jsonschema.validators import extend

    keywords = {name: _counted(check) for name, check in draft.VALIDATORS.items()}
    return extend(draft, keywords | {"uniqueItems": _counted(_unique)})


def _counted(check: Keyword) -> Keyword:
    """Return the check of a keyword that counts as work."""

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
        _work.left -= 1
        if _work.left < 0:
            raise _TooMuch
        return check(validator, value, instance, schema)

    return counted


def _unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Yield an error where two items are the same; the library's own check may take quadratic time."""
    from jsonschema.exceptions import ValidationError

    if value and isinstance(instance, list):
        items = {json.dumps(each, sort_keys=True) for each in instance}
        if len(items) < len(instance):
            yield ValidationError("two items are the same")


def _has_patterns(node: Schema) -> bool:
    """Return whether a schema names properties by regular expressions anywhere."""
    return "patternProperties" in node or any(
        _has_patterns(each) for keyword, value in node.items() for _, each in schemas_in(keyword, value)
    )


def _without_patterns(node: Schema, path: Path, *, further: bool) -> Schema:
    """Return a schema without regular expressions, and without what would choose another validator.

    Args:
        node: The schema.
        path: Of the schema.
        further: Further properties are known without regular expressions.
    """
    left_out = {"$schema", "pattern", "patternProperties"}
    if not further:
        left_out |= {"additionalProperties", "unevaluatedProperties"}
    return {
        keyword: changed(keyword, value, path, lambda each, at: _without_patterns(each, at, further=further))
        for keyword, value in node.items()
        if keyword not in left_out
    }
