"""Schemas of requests: what a grammar holds of them, which objects are closed, and what is checked afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")

from foredraft.constraints.grammar import check_grammar
from foredraft.errors import RequestError
from foredraft.serve import schemas
from foredraft.serve.problems import Problem
from foredraft.serve.schemas import broken, closed, fit
from foredraft.serve.tools import fitted_schema

WORD = {"type": "string"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# A schema with a keyword that the library of grammars lacks, and the places that are left out.
LACKING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (of(a={"type": "object", "propertyNames": {"pattern": "^x"}}), ("properties.a.propertyNames",)),
    (of(a={"type": "array", "items": WORD, "uniqueItems": True}), ("properties.a.uniqueItems",)),
    (of(a={"not": {"type": "string"}}), ("properties.a.not",)),
    ({**of(a=WORD, b=WORD), "if": of(a={"const": "x"}), "then": {"required": ["b"]}}, ("if", "then")),
    ({**of(a=WORD, b=WORD), "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
    (of(a={"type": "array", "contains": {"const": 1}}), ("properties.a.contains",)),
    ({**of(a=WORD), "unevaluatedProperties": False}, ("unevaluatedProperties",)),
    (of(a={"type": "string", "format": "zebra"}), ("properties.a.format",)),
    ({**of(a=WORD, b=WORD), "minProperties": 1}, ("minProperties",)),
    (of(a={"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}), ("properties.a.oneOf",)),
    (of(a={"type": "string", "pattern": "^(?!x)"}), ("properties.a.pattern",)),
    (of(a={"$ref": "https://example.com/schema.json"}), ("properties.a.$ref",)),
    ({**of(a={"$ref": "#/$defs/s"}), "$defs": {"s": {"type": "array", "uniqueItems": True}}}, ("$defs.s.uniqueItems",)),
    (of(a=of(b={"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]})), ("properties.a.properties.b.anyOf.1.uniqueItems",)),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "places"), LACKING, ids=lambda value: json.dumps(value)[:60])
def test_what_no_grammar_holds_is_left_out_by_place(schema: dict[str, Any], places: tuple[str, ...]) -> None:
    fitted = fit(schema, close=False)
    assert fitted.left_out == places
    check_grammar("json_schema", json.dumps(fitted.schema))
    assert fitted.schema["properties"].keys() == schema["properties"].keys(), "all else is held"
    with pytest.raises(Problem) as refused:
        fitted_schema("the tool 'f'", schema, "tools", strict=True, close=False)
    message = refused.value.message
    assert "the tool 'f' is strict" in message and places[0] in message and len(message) < 300


# Keywords that demand nothing.
NOTHING = [
    {"type": "object", "properties": None, "required": None},
    of(a={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": WORD}),
    of(a={"type": "array", "uniqueItems": False}),
    of(a={"type": "string", "deprecated": True, "description": None}),
    of(a={"enum": [None, "x"], "default": None}),
    {"$schema": "http://json-schema.org/draft-07/schema#", **of(a=WORD, b={"$ref": "#/properties/a"})},
    of(a={"type": "object", "properties": {"b": {"$ref": "#"}}}),
]


@pytest.mark.parametrize("schema", NOTHING, ids=lambda value: json.dumps(value)[:60])
def test_what_demands_nothing_is_no_demand(schema: dict[str, Any]) -> None:
    assert fit(schema, close=False).left_out == ()


def test_a_choice_of_one_becomes_a_choice_of_some() -> None:
    parts = [WORD, {"enum": ["x", 1]}]
    assert fit(of(a={"oneOf": parts}), close=False).schema["properties"]["a"] == {"anyOf": parts}


def test_schemas_that_do_not_hold_together_are_left_out_whole() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node", "required": ["next"]}}}
    schema = {**of(a={"$ref": "#/$defs/node", "required": ["next"]}), "$defs": {"node": node}}
    fitted = fit(schema, close=False)
    assert fitted.left_out in ((), ("the schema",))
    check_grammar("json_schema", json.dumps(fitted.schema))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "zebra"}, "type"),
        (of(a={"type": "zebra"}), r"properties\.a\.type"),
        (of(a={"properties": 3}), r"properties\.a\.properties"),
        (of(a={"$ref": "#/$defs/none"}), r"'#/\$defs/none', which names nothing"),
        *(
            ({**of(a={"$ref": f"#/anyOf/{at}"}), "anyOf": [{"required": ["a"]}]}, "which names nothing")
            for at in ("-1", " 0", "1", "x")
        ),
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused_with_its_place(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        fit(schema, close=False)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


@pytest.mark.heavy
def test_the_work_on_a_schema_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "SECONDS", 0.1)
    part = {"type": "array", "uniqueItems": True, "contains": of(a=WORD)}
    many = of(**{f"p{i}": part for i in range(600)})
    began = time.process_time()
    with pytest.raises(RequestError, match="too much that is not supported"):
        fit(many, close=False)
    assert time.process_time() - began < 20


CLOSED = {"additionalProperties": False}


def test_an_object_that_lists_its_properties_is_closed() -> None:
    inner = of(b=WORD)
    schema = of(a=inner, rows={"type": "array", "items": inner}, free={"type": "object"})
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["a"] == made["properties"]["rows"]["items"] == inner | CLOSED
    assert made["properties"]["free"] == {"type": "object"}, "a record"
    assert closed({"type": "object", "properties": {}}) == {"type": "object", "properties": {}} | CLOSED


@pytest.mark.parametrize(
    "speaks", [{"additionalProperties": True}, {"additionalProperties": WORD}, {"patternProperties": {"^x": WORD}}], ids=str
)  # fmt: skip
def test_an_object_that_speaks_of_others_stays_as_it_is(speaks: dict[str, Any]) -> None:
    assert closed(of(a=WORD) | speaks) == of(a=WORD) | speaks


def test_what_several_schemas_describe_together_stays_open() -> None:
    both = {"allOf": [{"$ref": "#/$defs/a"}, of(b=WORD)], "$defs": {"a": of(a=WORD)}}
    assert closed(both) == both
    base = {**of(kind=WORD), "oneOf": [of(a=WORD), of(b=WORD)]}
    assert closed(base) == base
    assert closed({**of(a=WORD), "then": of(b=WORD)}) == {**of(a=WORD), "then": of(b=WORD)}
    either = closed({"anyOf": [of(a=WORD), of(b=WORD)]})
    assert either == {"anyOf": [of(a=WORD) | CLOSED, of(b=WORD) | CLOSED]}
    needed = closed({**of(a=WORD, b=WORD), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert needed["additionalProperties"] is False
    alone = closed({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": of(a=WORD)}})
    assert alone["$defs"]["a"] == of(a=WORD) | CLOSED


@pytest.mark.parametrize(
    ("schema", "value", "places"),
    [
        (of(a={"type": "array", "uniqueItems": True}), {"a": [{"x": 1}, {"x": 1}]}, ["properties.a.uniqueItems"]),
        (of(a={"type": "array", "uniqueItems": True}), {"a": [{"x": 1}, {"x": 2}]}, []),
        (of(a={"propertyNames": {"enum": ["x"]}}), {"a": {"y": 1}}, ["properties.a.propertyNames.enum"]),
        (of(a={"not": {"const": 1}}), {"a": 1}, ["properties.a.not"]),
        ({**of(), "dependentRequired": {"a": ["b"]}}, {"a": 1}, ["dependentRequired"]),
        (of(a={"type": "string", "pattern": "^(?!x)"}), {"a": "x"}, []),  # no regular expression runs
        ({**of(), "patternProperties": {"^x": WORD}, **CLOSED}, {"xa": 1}, []),
        (of(a={"$ref": "https://example.com/schema.json"}), {"a": 1}, []),
        (of(a={"format": "date"}), {"a": "never"}, ["properties.a.format"]),
    ],
    ids=str,
)  # fmt: skip
def test_values_are_checked_beside_grammars(schema: dict[str, Any], value: Any, places: list[str]) -> None:
    assert broken(schema, json.dumps(value)) == places
    assert broken(schema, json.dumps(value)[:-1]) == [], "a cut value is not checked"


def test_the_work_of_a_check_is_bounded() -> None:
    """References that double at each step would be 2^40 checks, and an expression with nested stars takes as long."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    defs["d40"] = {"const": 1}
    began = time.process_time()
    broken({"$ref": "#/$defs/d0", "$defs": defs}, "2")
    broken(of(a={"pattern": "^(a+)+$"}), json.dumps({"a": "a" * 40 + "b"}))
    broken(of(a={"propertyNames": {"pattern": "^(a+)+$"}}), json.dumps({"a": {"a" * 40 + "b": 1}}))
    broken(of(a={"uniqueItems": True}), json.dumps({"a": [{"x": i} for i in range(20_000)]}))
    assert time.process_time() - began < 5
