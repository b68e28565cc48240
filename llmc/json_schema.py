"""Schemas as people mean them: an object that lists its properties has no others.

By the letter of JSON Schema an object without `additionalProperties` may have any further keys, and
a model that is held to it invents some until its tokens are spent. So such objects are closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where schemas are, below a keyword: one, a list of them, or by name.
_ONE = ("items", "additionalProperties", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
# What says which keys an object may have besides `properties`.
_OF_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
# What judges one object by several schemas: each closed, they would exclude each other.
_TOGETHER = ("if", "not", "dependentSchemas", "$dynamicRef")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` for each object that lists its properties and
    says nothing of others; as it is where one object must meet several schemas. JSON values."""
    return schema if _has_several(schema) else _closed(schema)


def _has_several(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    several = len(schema.get("allOf") or ()) > 1 or any(key in schema for key in _TOGETHER)
    beside = ("$ref" in schema or "allOf" in schema) and "properties" in schema
    return several or beside or any(_has_several(one) for one in _inner(schema))


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    found = [schema[key] for key in _ONE if key in schema]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            found += schema[key]
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            found += schema[key].values()
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _ONE:
        if key in made:
            made[key] = _closed(made[key])
    for key in _LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_closed(one) for one in made[key]]
    for key in _NAMED:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _closed(one) for name, one in made[key].items()}
    if made.get("properties") and not any(key in made for key in _OF_KEYS):
        made["additionalProperties"] = False
    return made
