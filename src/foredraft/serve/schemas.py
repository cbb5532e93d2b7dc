"""JSON schemas of requests: `fit` makes the one that a grammar can hold, and `broken` checks for the rest.

The library of grammars judges. In a schema that it refuses, each schema of the tree is tried by itself,
from the leaves on, and a keyword that it refuses is left out. Schemas and values come from strangers, so
a check looks at a bounded number of keywords, runs no regular expression, and fetches nothing
(https://json-schema.org/draft/2020-12/json-schema-core#section-10, and the drafts 4 to 2019-09).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from foredraft.constraints.grammar import check_grammar
from foredraft.constraints.shared_cache import LRUCache
from foredraft.errors import RequestError, shortened

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


def _below(node: Schema) -> Iterator[Schema]:
    for keyword, value in node.items():
        yield from (each for _, each in schemas_in(keyword, value))


def _changed(
    node: Schema,
    path: Path,
    change: Callable[[Schema, Path], Any],
    keeps: Callable[[str, Any], bool] = lambda keyword, value: True,
) -> Schema:
    """Return a schema with those of its keywords that it keeps, and each schema that they hold changed."""
    made: Schema = {}
    for keyword, value in node.items():
        if not keeps(keyword, value):
            continue
        for place, each in schemas_in(keyword, value):
            new = change(each, (*path, *place))
            if len(place) == 1:
                value = new
            else:
                value = made.setdefault(keyword, copy(value))
                value[place[-1]] = new
        made[keyword] = value
    return made


def shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the schema"


MOST = 5_000  # keywords that a check looks at: some 0.1 s
MOST_TOLD = 20  # faults of one value
MOST_SHOWN = 200  # characters of a fault


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
    """Return the places of the keywords that a text of JSON breaks; [] where it is none, as when cut."""
    from referencing import Registry

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found: list[str] = []
    try:
        draft = _draft(schema)
        # without regular expressions, and without what would choose another validator
        left_out = {"$schema", "pattern", "patternProperties"}
        if _has_patterns(schema):
            left_out |= {"additionalProperties", "unevaluatedProperties"}

        def without(node: Schema, path: Path) -> Schema:
            return _changed(node, path, without, lambda keyword, value: keyword not in left_out)

        checked = without(schema, ())
        _work.left = MOST
        validator = _bounded(draft)(checked, registry=Registry(), format_checker=draft.FORMAT_CHECKER)
        for error in validator.iter_errors(value):
            found.append(shown(tuple(error.absolute_schema_path)))
            if len(found) == MOST_TOLD:
                break
    except Exception:  # too much work, a reference to elsewhere, or what else a stranger's schema leads to
        return found
    return found


def _draft(schema: Schema) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    return validator_for(schema, default=Draft202012Validator)


_work = threading.local()  # how many further keywords the check of a thread may look at: `left`


@cache
def _bounded(draft: Any) -> Any:
    """Return a draft's validator that fails once its checks have looked at too many keywords."""
    from jsonschema.validators import extend

    def counted(check: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            _work.left -= 1
            if _work.left < 0:
                raise RuntimeError("a check has looked at too many keywords")
            return check(*given)

        return count

    keywords = draft.VALIDATORS | {"uniqueItems": _unique}
    return extend(draft, {name: counted(check) for name, check in keywords.items()})


def _unique(_: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Yield an error where two items are the same; the library's own check may take quadratic time."""
    from jsonschema.exceptions import ValidationError

    if value and isinstance(instance, list):
        items = {json.dumps(each, sort_keys=True) for each in instance}
        if len(items) < len(instance):
            yield ValidationError("two items are the same")


def _has_patterns(node: Schema) -> bool:
    return "patternProperties" in node or any(map(_has_patterns, _below(node)))


TOGETHER = ("allOf", "anyOf", "oneOf")  # keywords whose schemas describe the object that the schema describes
SOMETIMES = ("then", "else", "dependentSchemas")  # they do so for some objects
# Keywords whose schemas look at a value, or hold for some; a closed one would find or forbid something else.
CONDITIONS = frozenset(("not", "if", "contains", "propertyNames", *SOMETIMES))
SPEAKS = ("additionalProperties", "patternProperties", "unevaluatedProperties")  # about further properties


def closed(schema: Schema) -> Schema:
    """Return a schema whose objects take the properties that it lists alone."""
    shared = frozenset(_shared(schema, among=False))
    return _closed(schema, (), shared, among="#" in shared)


def _closed(node: Schema, path: Path, shared: frozenset[str], *, among: bool) -> Schema:
    several = _gives_with_others(node)

    def change(each: Schema, at: Path) -> Schema:
        keyword = at[len(path)]
        if keyword in CONDITIONS:
            return each
        inner = keyword in TOGETHER and (among or several)
        return _closed(each, at, shared, among=inner or _reference(at) in shared)

    made = _changed(node, path, change)
    silent = all(node.get(keyword, False) is False for keyword in SPEAKS)
    if isinstance(node.get("properties"), dict) and silent and not among and not several:
        made["additionalProperties"] = False
    return made


def _shared(node: Schema, *, among: bool) -> Iterator[str]:
    """Yield the references of schemas that are among several of one object."""
    several = _gives_with_others(node)
    if isinstance(node.get("$ref"), str) and (among or several):
        yield node["$ref"]
    for keyword, value in node.items():
        inner = keyword in CONDITIONS or (keyword in TOGETHER and (among or several))
        for _, each in schemas_in(keyword, value):
            yield from _shared(each, among=inner)


def _gives_with_others(node: Schema) -> bool:
    """Return whether several schemas give the properties of the object that a schema describes."""
    givers = bool(node.get("properties")) + ("$ref" in node)
    for keyword in (*TOGETHER, *SOMETIMES):
        giving = sum(_gives(each) for _, each in schemas_in(keyword, node.get(keyword)))
        givers += giving if keyword == "allOf" else bool(giving)  # of the others one holds at a time
    return givers > 1


def _gives(node: Schema) -> bool:
    """Return whether a schema gives properties, itself or by the schemas that it joins."""
    if any(keyword in node for keyword in ("properties", "$ref", *SPEAKS)):
        return True
    return any(_gives(each) for keyword in TOGETHER for _, each in schemas_in(keyword, node.get(keyword)))


def _reference(path: Path) -> str:
    return "/".join(["#", *(str(part).replace("~", "~0").replace("/", "~1") for part in path)])


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
    """A schema as a grammar holds it."""

    whole: Schema  # the schema as it was given, without keywords that demand nothing
    schema: Schema  # what the grammar holds
    left_out: tuple[str, ...] = ()  # the places of the keywords that it does not hold


_fitted = LRUCache[tuple[str, bool], Fitted](KEPT_SCHEMAS, KEPT_CHARACTERS)


def fit(schema: Schema, *, close: bool) -> Fitted:
    text = json.dumps(schema)
    return _fitted.get((text, close), len(text), lambda: _fit(schema, close=close))


def _fit(schema: Schema, *, close: bool) -> Fitted:
    whole = _tidied(schema, ())
    root = closed(whole) if close else whole
    if _refusal(root) is None:
        return Fitted(whole, root)
    if (found := fault(root)) is not None:
        raise RequestError(f"is no JSON schema: {found}", remedy="correct it")
    for reference in _references(root):
        try:
            named: Any = root
            for part in reference.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                named = named[_index(key) if isinstance(named, list) else key]
        except (LookupError, TypeError):
            problem = f"has the $ref {shortened(reference)}, which names nothing"
            raise RequestError(problem, remedy="correct it") from None
    fitting = _Fitting()
    given = {keyword: root[keyword] for keyword in DEFINITIONS if keyword in root}
    rest = {keyword: value for keyword, value in root.items() if keyword not in DEFINITIONS}
    made = _changed(given, (), fitting.fitted) | fitting.fitted(rest, ())
    if _refusal(made) is not None:  # each holds by itself, and not together with what references name
        made = {"type": "object"} if root.get("type") == "object" else {}
        fitting.left_out.append(())
    return Fitted(whole, made, tuple(dict.fromkeys(map(shown, fitting.left_out))))


def _index(key: str) -> int:
    if not key.isdecimal():
        raise LookupError(key)
    return int(key)


def _tidied(node: Schema, path: Path) -> Schema:
    """Return a schema without keywords that demand nothing: null where no value may stand, or no demand."""

    def demands(keyword: str, value: Any) -> bool:
        vacuous = any(value == each and type(value) is type(each) for each in VACUOUS.get(keyword, ()))
        return keyword not in UNKNOWN_ANNOTATIONS and (value is not None or keyword in DATA) and not vacuous

    return _changed(node, path, _tidied, demands)


def _refusal(schema: Schema) -> str | None:
    try:
        check_grammar("json_schema", json.dumps(schema))
    except RequestError as error:
        return str(error.problem)
    return None


def _references(node: Schema) -> list[str]:
    own = node.get("$ref")
    found = [own] if isinstance(own, str) and (own == "#" or own.startswith("#/")) else []
    return found + [each for inner in _below(node) for each in _references(inner)]


class _Fitting:
    def __init__(self) -> None:
        self.left_out: list[Path] = []  # the places of the keywords that the grammar does not hold
        self._end = time.monotonic() + SECONDS

    def fitted(self, node: Schema, path: Path) -> Schema:
        """Return a schema of the tree as the library takes it, whatever its references name."""
        if self._holds(node):
            return node
        made = _changed(node, path, self.fitted)
        for keyword in [*made]:  # each by itself
            typed = {"type": made["type"]} if "type" in made else {}
            if keyword in ANNOTATIONS or self._holds(typed | {keyword: made[keyword]}):
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
        if time.monotonic() > self._end:
            raise RequestError("has too much that is not supported", remedy="give a simpler schema")
        return _refusal(_unbound(node, ())) is None


def _unbound(node: Schema, path: Path) -> Schema:
    """Return a schema whose references to other places of the whole name anything."""

    def keeps(keyword: str, value: Any) -> bool:
        return keyword != "$ref" or not isinstance(value, str) or not value.startswith("#")

    return _changed(node, path, _unbound, keeps)
