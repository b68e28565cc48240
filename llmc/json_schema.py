"""Read JSON schemas the way authors mean them: an object has only the properties that it lists.

By the JSON Schema specification, an object without `additionalProperties` can have any other keys,
and a model constrained by such a schema invents keys until it runs out of tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
# Keywords other than `properties` that define which keys an object can have.
_OF_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
# Keywords that apply several schemas to one object: if closed, they would exclude each other.
_TOGETHER = ("if", "not", "dependentSchemas", "$dynamicRef")


# The formats of JSON Schema (draft 2020-12). Others, such as OpenAPI's, have no meaning there.
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)


_BRANCHES = ("if", "then", "else")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
# What every property's name is, as zod writes it for records.
_ANY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)


def without_annotations(schema: Any) -> Any:
    """Leave out what excludes no value: formats that JSON Schema does not define (`password`,
    `binary`), and `propertyNames` that all names match. JSON values."""
    made = copy.deepcopy(schema)
    for one in _schemas(made):
        if isinstance(one.get("format"), str) and one["format"] not in _FORMATS:
            del one["format"]
        if one.get("propertyNames") in _ANY_NAME:
            del one["propertyNames"]
    return made


def best_effort(schema: Any) -> Any:
    """The schema without what can't be enforced, for a caller that does not insist on it. JSON
    values.

    Patterns that look around are left out, and keywords that would keep an object open to keys that
    nobody lists. The compiler of grammars ignores other keywords that it does not know, and that at
    most one branch of a `oneOf` may match.
    """
    made = copy.deepcopy(schema)
    for one in _schemas(made):
        if isinstance(one.get("pattern"), str) and _LOOKS_AROUND.search(one["pattern"]):
            del one["pattern"]
        if one.get("unevaluatedProperties") is False:
            del one["unevaluatedProperties"]
        for key in ("not", *(() if _adds_keys(one) else _BRANCHES)):
            one.pop(key, None)
    if not isinstance(made, dict):
        return made
    given = made.get("x-guidance")
    options = {**(given if isinstance(given, dict) else {}), "lenient": True, "coerce_one_of": True}
    return {**made, "x-guidance": options}


def _adds_keys(schema: Mapping[str, Any]) -> bool:
    """Whether a branch of if, then and else lists other properties than the schema."""
    listed = [one.get("properties") for one in map(schema.get, _BRANCHES) if isinstance(one, dict)]
    known = schema.get("properties")
    return any(set(names) - set(known or ()) for names in listed if isinstance(names, dict))


def closed(schema: Any) -> Any:
    """Add `additionalProperties: false` to each object that lists its properties and does not
    mention others. Returns the schema unchanged if an object must match several. JSON values."""
    made = copy.deepcopy(schema)
    inside = list(_schemas(made))
    if any(_meets_several(one) for one in inside):
        return schema
    for one in inside:
        if one.get("properties") and not any(key in one for key in _OF_KEYS):
            one["additionalProperties"] = False
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and its nested schemas, skipping those that are not objects."""
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
