"""Objects that list their properties have no others, where that is all their schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmc.json_schema import closed, without_annotations
from llmc.structured_outputs import StructuredOutputsParams

PLAIN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**PLAIN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PLAIN, CLOSED),
        (CLOSED, CLOSED),
        ({**PLAIN, "additionalProperties": True}, {**PLAIN, "additionalProperties": True}),
        ({**PLAIN, "additionalProperties": PLAIN}, {**PLAIN, "additionalProperties": CLOSED}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array", "items": PLAIN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [PLAIN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"x": PLAIN}, "$ref": "#/$defs/x"},
            {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"},
        ),
        ({"allOf": [PLAIN]}, {"allOf": [CLOSED]}),
        (  # a property that is called as a keyword is
            {"properties": {"properties": {"type": "string"}, "allOf": {"type": "string"}}},
            {
                "properties": {"properties": {"type": "string"}, "allOf": {"type": "string"}},
                "additionalProperties": False,
            },
        ),
        ({"const": PLAIN, "enum": [PLAIN]}, {"const": PLAIN, "enum": [PLAIN]}),
        ({"allOf": 5, "items": [1], "properties": "a"}, None),  # no schemas: for others to refuse
        (True, True),
    ],
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == (schema if expected is None else expected)
    assert json.dumps(schema) == before


BEST_EFFORT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "array", "uniqueItems": True, "items": PLAIN}, {"type": "array", "items": CLOSED}),
    ({"type": "string", "pattern": "^(?!no).*$"}, {"type": "string"}),
    ({**PLAIN, "unevaluatedProperties": False}, CLOSED),
    ({**PLAIN, "if": PLAIN, "then": {"required": ["a"]}, "not": {"required": ["b"]}}, CLOSED),
]


@pytest.mark.parametrize(("schema", "meant"), BEST_EFFORT, ids=lambda value: str(value)[:50])
def test_what_can_not_be_enforced_is_ignored_unless_strict(
    schema: dict[str, Any], meant: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    relaxed = json.loads(str(StructuredOutputsParams(json=schema, strict=False).json))
    assert relaxed.pop("x-guidance")["lenient"]
    ignored = {"uniqueItems"}
    assert {key: value for key, value in relaxed.items() if key not in ignored} == meant
    assert json.dumps(schema) == before


def test_a_condition_that_names_other_keys_keeps_an_object_open() -> None:
    schema = {**PLAIN, "if": PLAIN, "then": {"properties": {"b": {"type": "integer"}}}}
    relaxed = json.loads(str(StructuredOutputsParams(json=schema, strict=False).json))
    assert "additionalProperties" not in relaxed


def test_formats_that_json_schema_does_not_define_are_left_out() -> None:
    """Those of OpenAPI and pydantic; no validator checks them."""
    kinds = {
        "secret": {"type": "string", "format": "password"},
        "day": {"type": "string", "format": "date"},
        "format": {"type": "integer", "format": "int64"},
        "list": {"type": "array", "items": {"type": "string", "format": "binary"}},
    }
    schema = {"type": "object", "properties": kinds, "enum": [{"format": "mine"}]}
    before = json.dumps(schema)
    kept = {
        "secret": {"type": "string"},
        "day": {"type": "string", "format": "date"},
        "format": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "string"}},
    }
    assert without_annotations(schema) == {**schema, "properties": kept}
    assert json.dumps(schema) == before
    for additional in (False, True):
        spec = StructuredOutputsParams(json=schema, additional_properties=additional)
        assert json.loads(spec.text)["properties"] == kept


def test_names_that_can_be_any_are_left_out() -> None:
    record = {"type": "object", "additionalProperties": {"type": "number"}}
    assert without_annotations({**record, "propertyNames": {"type": "string"}}) == record
    names = {**record, "propertyNames": {"pattern": "^a"}}
    assert without_annotations(names) == names
    both = {**PLAIN, "propertyNames": {"type": "string"}}
    spec = StructuredOutputsParams(json=both)
    assert json.loads(spec.text) == PLAIN, "an object that mentions other names is open"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PLAIN, {"properties": {"b": {}}}]},
        {"$defs": {"x": PLAIN}, "items": {"$ref": "#/$defs/x", "properties": {"b": {}}}},
        {**PLAIN, "if": PLAIN, "then": {"required": ["a"]}},
        {"not": PLAIN},
    ],
)
def test_objects_that_meet_several_schemas_are_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_request_may_ask_for_the_letter() -> None:
    assert json.loads(StructuredOutputsParams(json=PLAIN).text) == CLOSED
    assert json.loads(StructuredOutputsParams(json=json.dumps(PLAIN)).text) == CLOSED
    assert json.loads(StructuredOutputsParams(json=PLAIN, additional_properties=True).text) == PLAIN
