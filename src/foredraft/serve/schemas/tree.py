"""The tree of a JSON schema: which keywords hold schemas, and where (JSON Schema, draft 2020-12, and before).

https://json-schema.org/draft/2020-12/json-schema-core#section-10, and the drafts 4 to 2019-09.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

__all__ = ["ANNOTATIONS", "DEFINITIONS", "Path", "Schema", "changed", "schemas_in", "shown", "target"]

Schema: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]  # keys and indices from the root

ONE = frozenset(
    "items additionalItems additionalProperties contains not if then else propertyNames unevaluatedItems"
    " unevaluatedProperties".split()
)
SEVERAL = frozenset("allOf anyOf oneOf prefixItems items".split())
NAMED = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
DEFINITIONS = ("$defs", "definitions")
# Keywords that say nothing about a value.
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly contentEncoding contentMediaType"
    " contentSchema $comment $schema $id id $anchor $vocabulary $dynamicAnchor $recursiveAnchor".split()
)


def schemas_in(keyword: str, value: Any) -> Iterator[tuple[Path, Schema]]:
    """Yield the schemas that the value of a keyword holds directly, with their paths from the keyword on."""
    if isinstance(value, dict):
        if keyword in NAMED:
            yield from (((keyword, name), each) for name, each in value.items() if isinstance(each, dict))
        elif keyword in ONE:
            yield (keyword,), value
    elif isinstance(value, list) and keyword in SEVERAL:
        yield from (((keyword, place), each) for place, each in enumerate(value) if isinstance(each, dict))


def changed(keyword: str, value: Any, path: Path, change: Callable[[Schema, Path], Any]) -> Any:
    """Return the value of a keyword with each schema that it holds directly changed.

    Args:
        keyword: The keyword.
        value: Its value.
        path: Of the schema that has it.
        change: Returns the new form of a schema at a path.
    """
    if isinstance(value, dict) and keyword in NAMED:
        return {
            name: change(each, (*path, keyword, name)) if isinstance(each, dict) else each
            for name, each in value.items()
        }
    if isinstance(value, dict) and keyword in ONE:
        return change(value, (*path, keyword))
    if isinstance(value, list) and keyword in SEVERAL:
        return [
            change(each, (*path, keyword, place)) if isinstance(each, dict) else each
            for place, each in enumerate(value)
        ]
    return value


def target(root: Schema, reference: str) -> Any:
    """Return what a reference within the schema names, such as "#/$defs/a".

    Raises:
        LookupError: It names nothing.
    """
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() else _nothing(reference)
        elif isinstance(found, dict):
            found = found[key]
        else:
            _nothing(reference)
    return found


def _nothing(reference: str) -> Any:
    raise LookupError(reference)


def shown(path: Path) -> str:
    """Return a path as a message names it."""
    return ".".join(map(str, path)) or "the schema"
