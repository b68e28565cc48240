"""StructuredOutputsParams: exactly one kind, bounded in size and depth."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.errors import InvalidRequestError
from llmc.structured_outputs import MAX_GRAMMAR_DEPTH, StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"type": "integer"}}, "json", '{"type": "integer"}'),
        ({"json": '{"type":"integer"}'}, "json", '{"type": "integer"}'),
        ({"json": True}, "json", "{}"),
        ({"json_object": True}, "json_object", '{"type": "object"}'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_each_kind(given: dict[str, Any], kind: str, text: str) -> None:
    spec = StructuredOutputsParams(**given)
    assert (spec.kind, spec.text) == (kind, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json_object": False}, "needs exactly one"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"choice": []}, "choice must have 1 to 1000 strings, got 0"),
        ({"choice": ["a", ""]}, "choice must contain non-empty strings"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": ["a"] * 1001}, "choice must have 1 to 1000 strings, got 1001"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": False}, "json is the schema false, which no JSON matches"),
        ({"json": "false"}, "json is the schema false"),
        ({"json": False, "regex": "a"}, "got json and regex"),
        ({"json": "[1]"}, "json must be a JSON schema"),
        ({"json": {"a": object()}}, "json can't be written as JSON"),
        ({"regex": "a" * 70_000}, "regex has 70000 bytes; the limit is 65536"),
        ({"grammar": "(" * 60_000}, "grammar is nested 60000 levels deep; the limit is 200"),
        ({"json": "[" * 60_000}, "json is nested 60000 levels deep"),
        ({"json": '{"not":' * 300 + "{}" + "}" * 300}, "json is nested 301 levels deep"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        StructuredOutputsParams(**given)
    assert message in str(caught.value)
    assert (caught.value.param or "").startswith("structured_outputs")


def test_the_deepest_that_is_allowed() -> None:
    nested = "(" * MAX_GRAMMAR_DEPTH + "a" + ")" * MAX_GRAMMAR_DEPTH
    assert StructuredOutputsParams(regex=nested).text == nested
