"""Closed objects: a schema that lists properties and is silent about others takes no others.

Models invent keys where a schema lets them. vLLM and llama.cpp close the arguments of tools in the same way,
and OpenAI's strict schemas must be closed. An object without a list of properties is free: it is a record.

Where several schemas give the properties of one object, none of them knows those of the others. Such an
object stays open, and so does what its references name.
"""

from __future__ import annotations

from collections.abc import Iterator

from foredraft.serve.schemas.tree import Path, Schema, changed, schemas_in

__all__ = ["closed"]

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
    """Return a schema of the tree, closed.

    Args:
        node: The schema.
        path: Of the schema.
        shared: References to schemas that are among several of one object.
        among: It is among several of one object itself.
    """
    several, made = _gives_with_others(node), {}
    for keyword, value in node.items():
        inner = keyword in TOGETHER and (among or several)

        def change(each: Schema, at: Path, inner: bool = inner) -> Schema:
            return _closed(each, at, shared, among=inner or _reference(at) in shared)

        made[keyword] = value if keyword in CONDITIONS else changed(keyword, value, path, change)
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
    """Return the reference that names the schema at a path."""
    return "/".join(["#", *(str(part).replace("~", "~0").replace("/", "~1") for part in path)])
