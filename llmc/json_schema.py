"""Schemas as people mean them: an object that lists its properties has no others.

By the letter of JSON Schema an object without `additionalProperties` may have any further keys, and
a model that is held to it invents some until its tokens are spent. So such objects are closed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
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
    made = copy.deepcopy(schema)
    inside = list(_schemas(made))
    if any(_meets_several(one) for one in inside):
        return schema
    for one in inside:
        if one.get("properties") and not any(key in one for key in _OF_KEYS):
            one["additionalProperties"] = False
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and those inside of it, as far as they are objects."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [schema[key] for key in _ONE if key in schema]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            inner += schema[key]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            inner += schema[key].values()
    for one in inner:
        yield from _schemas(one)


def _meets_several(schema: Mapping[str, Any]) -> bool:
    together = schema.get("allOf")
    several = isinstance(together, list) and len(together) > 1
    beside = ("$ref" in schema or "allOf" in schema) and "properties" in schema
    return several or beside or any(key in schema for key in _TOGETHER)
