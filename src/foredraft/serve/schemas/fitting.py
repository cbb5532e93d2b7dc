"""Fitting: a JSON schema -> the schema that a grammar can hold, and the keywords that it cannot.

The library of grammars judges: a schema that it takes stays as it is. In one that it refuses, each schema of
the tree is tried by itself, from the leaves on, and a keyword that it refuses there is left out. What is no
valid schema is refused with the place of the fault.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from foredraft.constraints.compiling import check_grammar
from foredraft.constraints.kept import Kept
from foredraft.errors import RequestError, shortened
from foredraft.serve.schemas.checking import fault
from foredraft.serve.schemas.closing import closed
from foredraft.serve.schemas.tree import (
    ANNOTATIONS,
    DEFINITIONS,
    Path,
    Schema,
    changed,
    schemas_in,
    shown,
    target,
)

__all__ = ["Fitted", "fit"]

SECONDS = 2.0  # that fitting may take: a schema of 100 keywords that the library lacks takes some 0.05 s
KEPT_SCHEMAS, KEPT_CHARACTERS = 512, 2 << 20  # an agent sends the same tools with each request
DATA = frozenset(("const", "enum", "default", "examples"))  # keywords for which null is a value
# Values with which a keyword demands nothing.
VACUOUS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"}), "not": (False,),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "minProperties": (0,),
}  # fmt: skip
# What the library calls unknown though it says nothing about a value.
UNKNOWN_ANNOTATIONS = ("$dynamicAnchor", "$recursiveAnchor")
BODY = ("type", "properties", "items", "required", "anyOf", "allOf", "$ref")  # keywords that say the most


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schema as a grammar holds it.

    Attributes:
        whole: The schema as it was given, without keywords that demand nothing.
        schema: What the grammar holds.
        left_out: The places of the keywords that it does not hold.
    """

    whole: Schema
    schema: Schema
    left_out: tuple[str, ...] = ()


_fitted = Kept[tuple[str, bool], Fitted](KEPT_SCHEMAS, KEPT_CHARACTERS)


def fit(schema: Schema, *, close: bool) -> Fitted:
    """Return a schema as a grammar can hold it.

    Args:
        schema: The schema.
        close: Its objects take the properties that it lists alone.

    Raises:
        RequestError: It is no valid schema, or too large; its problem goes on after a name.
    """
    text = json.dumps(schema)
    return _fitted.get((text, close), len(text), lambda: _fit(schema, close=close))


def _fit(schema: Schema, *, close: bool) -> Fitted:
    whole = _tidied(schema, ())
    root = closed(whole) if close else whole
    if _refusal(root) is None:
        return Fitted(whole, root)
    _check(root)
    fitting = _Fitting()
    made = {
        keyword: changed(keyword, value, (), fitting.fitted) if keyword in DEFINITIONS else value
        for keyword, value in root.items()
    }
    rest = {keyword: value for keyword, value in made.items() if keyword not in DEFINITIONS}
    made = {keyword: made[keyword] for keyword in DEFINITIONS if keyword in made} | fitting.fitted(rest, ())
    if _refusal(made) is not None:  # each holds by itself, and not together with what references name
        made = {"type": "object"} if root.get("type") == "object" else {}
        fitting.left_out.append(())
    return Fitted(whole, made, tuple(dict.fromkeys(map(shown, fitting.left_out))))


def _tidied(node: Schema, path: Path) -> Schema:
    """Return a schema without keywords that demand nothing: null where no value may stand, or no demand."""
    return {
        keyword: changed(keyword, value, path, _tidied)
        for keyword, value in node.items()
        if keyword not in UNKNOWN_ANNOTATIONS
        and (value is not None or keyword in DATA)
        and not any(value == each and type(value) is type(each) for each in VACUOUS.get(keyword, ()))
    }


def _refusal(schema: Schema) -> str | None:
    """Return why the library refuses a schema; None where it takes it."""
    try:
        check_grammar("json_schema", json.dumps(schema))
    except RequestError as error:
        return str(error.problem)
    return None


def _check(root: Schema) -> None:
    """Check that a schema that the library refuses is one at all.

    Raises:
        RequestError: It is none.
    """
    if (found := fault(root)) is not None:
        raise RequestError(f"is no JSON schema: {found}", remedy="correct it")
    for reference in _references(root):
        try:
            target(root, reference)
        except LookupError:
            raise RequestError(
                f"has the $ref {shortened(reference)}, which names nothing", remedy="correct it"
            ) from None


def _references(node: Schema) -> list[str]:
    """Return the references of a schema to places within it."""
    own = node.get("$ref")
    found = [own] if isinstance(own, str) and (own == "#" or own.startswith("#/")) else []
    for keyword, value in node.items():
        for _, each in schemas_in(keyword, value):
            found += _references(each)
    return found


class _Fitting:
    """The fitting of one schema.

    Attributes:
        left_out: The places of the keywords that the grammar does not hold.
    """

    def __init__(self) -> None:
        self.left_out: list[Path] = []
        self._end = time.monotonic() + SECONDS

    def fitted(self, node: Schema, path: Path) -> Schema:
        """Return a schema of the tree as the library takes it, whatever its references name."""
        if self._holds(node):
            return node
        made = {keyword: changed(keyword, value, path, self.fitted) for keyword, value in node.items()}
        for keyword in [*made]:  # each by itself
            beside = {"type": made["type"]} if "type" in made else {}
            if keyword in ANNOTATIONS or self._holds(beside | {keyword: made[keyword]}):
                continue
            self.left_out.append((*path, keyword))
            value = made.pop(keyword)
            if keyword == "oneOf" and "anyOf" not in made:  # one of them at least
                made["anyOf"] = value
        if self._holds(made):
            return made
        for keyword in sorted(made, key=BODY.__contains__):  # beside the others; what says least comes first
            without = {name: value for name, value in made.items() if name != keyword}
            if keyword not in ANNOTATIONS and self._holds(without):
                self.left_out.append((*path, keyword))
                return without
        self.left_out.append(path)
        return {}

    def _holds(self, node: Schema) -> bool:
        """Return whether the library takes a schema, whatever its references name."""
        if time.monotonic() > self._end:
            raise RequestError("has too much that is not supported", remedy="give a simpler schema")
        return _refusal(_unbound(node, ())) is None


def _unbound(node: Schema, path: Path) -> Schema:
    """Return a schema whose references to other places of the whole name anything."""
    return {
        keyword: changed(keyword, value, path, _unbound)
        for keyword, value in node.items()
        if keyword != "$ref" or not isinstance(value, str) or not value.startswith("#")
    }
