"""StructuredOutputsParams: the constraint on a request's output, one of five kinds of grammar.

Plain data; llmc/structured/ turns it into token masks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.json_schema import best_effort, closed, without_annotations

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GRAMMAR_DEPTH = 200
MAX_CHOICES = 1000
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Set exactly one kind. The whole output matches it, unless max_tokens truncates it.

    Raises InvalidRequestError if none or several are set, or if the grammar is too large (64 KiB)
    or nested too deeply (200 levels).
    """

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema; kept as text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these strings
    grammar: str | None = None  # GBNF (an EBNF) or Lark
    preamble: str = ""  # Lark for text before it, such as reasoning; the rest is `@answer`
    additional_properties: bool = False  # objects of `json` can have keys that they do not list
    # whether keywords of `json` that can't be enforced are an error; otherwise they are ignored
    strict: bool = True

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise _fail("", f"needs exactly one of {', '.join(_KINDS)}, got {got}")
        if self.json is not None:
            text = _schema_text(self.json, self.additional_properties, self.strict)
            object.__setattr__(self, "json", text)
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _fail(name, f"must be a non-empty string, got {value!r}")
        _check_size(given[0], self.text)
        if not isinstance(self.preamble, str):
            raise _fail("preamble", f"must be a string, got {self.preamble!r}")

    @property
    def kind(self) -> str:
        return self._given()[0]

    def _given(self) -> list[str]:
        values = {name: getattr(self, name) for name in _KINDS}
        values["json_object"] = values["json_object"] or None  # unlike the schema false
        return [name for name, value in values.items() if value is not None]

    @property
    def text(self) -> str:
        """The grammar in its own language; complete together with `kind` and `preamble`."""
        if self.json_object:
            return '{"type": "object"}'
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        return str(getattr(self, self.kind))


def _fail(name: str, rule: str) -> InvalidRequestError:
    param = f"structured_outputs.{name}" if name else "structured_outputs"
    return InvalidRequestError(f"{param} {rule}", param=param)


def _schema_text(schema: object, additional_properties: bool, strict: bool) -> str:
    if isinstance(schema, str):
        _check_size("json", schema)  # before it is parsed
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _fail("json", f"is not JSON: {error}") from error
    else:
        parsed = schema
    if not isinstance(parsed, Mapping | bool):
        raise _fail("json", f"must be a JSON schema (an object), got {type(parsed).__name__}")
    if parsed is False:
        raise _fail("json", "is the schema false, which no JSON matches")
    if parsed is True:
        parsed = {}  # the same schema; the library applies its options only to objects
    try:
        text = json.dumps(parsed, ensure_ascii=False)
        _check_size("json", text)  # before it is traversed
        made = parsed if strict else best_effort(parsed)
        made = without_annotations(made if additional_properties else closed(made))
        return json.dumps(made, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _fail("json", f"can't be written as JSON: {error}") from error


def _checked_choice(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise _fail("choice", f"must be a list of strings, got {choice!r}")
    if not 0 < len(choice) <= MAX_CHOICES:
        raise _fail("choice", f"must have 1 to {MAX_CHOICES} strings, got {len(choice)}")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise _fail("choice", f"must contain non-empty strings, got {text!r}")
    return tuple(choice)


def _check_size(name: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _fail(name, f"has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    if name == "choice":
        return
    depth = deepest = 0
    for letter in text:
        if letter in _OPEN:
            depth += 1
            deepest = max(deepest, depth)
        elif letter in _CLOSE:
            depth = max(0, depth - 1)
    if deepest > MAX_GRAMMAR_DEPTH:
        raise _fail(name, f"is nested {deepest} levels deep; the limit is {MAX_GRAMMAR_DEPTH}")
