"""The fields of a body that request structured outputs -> one StructuredOutputsParams.

response_format | structured_outputs | guided_json, guided_regex, guided_choice, guided_grammar |
json_schema, regex, ebnf, grammar
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmc.errors import InvalidRequestError
from llmc.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llmc.server.protocol import GenerationBody

GUIDED = {  # under the names that other servers have, or had
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
FORMATS = ("text", "json_object", "json_schema")


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """None for free text. InvalidRequestError for an invalid grammar, or for different ones."""
    if body.response_format is not None:
        known = ("type", "json_schema", "schema")
        is_text = body.response_format.get("type") == "text"
        _check_keys("response_format", body.response_format, known[:2] if is_text else known)
    fields = _asking(body)
    made: StructuredOutputsParams | None = None
    for field in fields:
        made = _made(field, body)
    # A client that does not know the server's version sends one under its old and new name.
    if len(fields) > 1 and len({_made(field, body, strict=True) for field in fields}) > 1:
        raise InvalidRequestError(
            f"{' and '.join(fields)} can't be combined; send only one of them", param=fields[1]
        )
    return made


def _made(field: str, body: GenerationBody, **others: Any) -> StructuredOutputsParams:
    options = _options(field, getattr(body, field))
    with grammar_from(field):
        return StructuredOutputsParams(**{**options, **others})


def grammar_field(body: GenerationBody) -> str:
    """The field that the body's grammar comes from: without any that requests one, that is the
    limit on reasoning tokens."""
    return (_asking(body) or ["thinking_token_budget"])[0]


@contextmanager
def grammar_from(field: str) -> Iterator[None]:
    """Make errors about the grammar name the field of the body that it comes from."""
    try:
        yield
    except InvalidRequestError as exc:
        if field != "structured_outputs" and (exc.param or "").startswith("structured_outputs"):
            text = str(exc).replace(str(exc.param), field, 1)
            raise InvalidRequestError(text, param=field, code=exc.code) from exc
        raise


def _asking(body: GenerationBody) -> list[str]:
    names = ("response_format", "structured_outputs", *GUIDED)
    fields = [name for name in names if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.get("type") == "text":
        fields.remove("response_format")
    return fields


def _options(field: str, value: Any) -> dict[str, Any]:
    if field == "response_format":
        return _of_response_format(value)
    if field in GUIDED:
        return {GUIDED[field]: value}
    options: dict[str, Any] = value.model_dump(by_alias=True, exclude_none=True)
    return options


def _of_response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in FORMATS:
        raise InvalidRequestError(
            f"response_format.type must be one of {', '.join(FORMATS)}, got {kind!r:.80}",
            param="response_format.type",
        )
    beside = given.get("schema")  # another form of both kinds
    if beside is not None:
        if given.get("json_schema") is not None or not isinstance(beside, dict | bool):
            raise InvalidRequestError(
                "response_format.schema must be a JSON schema, in place of json_schema, "
                f"got {beside!r:.80}",
                param="response_format.schema",
            )
        return {"json": beside, "strict": False}
    if kind == "json_object":
        return {"json_object": True}
    described = given.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise InvalidRequestError(
            'response_format of type "json_schema" needs a schema: {"type": "json_schema", '
            '"json_schema": {"name": "...", "schema": {...}}}',
            param="response_format.json_schema",
        )
    _check_keys(
        "response_format.json_schema", described, ("name", "description", "schema", "strict")
    )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(
            f"response_format.json_schema.strict must be true or false, got {strict!r:.80}",
            param="response_format.json_schema.strict",
        )
    return {"json": described["schema"], "strict": strict is True}


def _check_keys(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise InvalidRequestError(
                f"{where} has no field {key[:80]!r}; it has {', '.join(known)}",
                param=f"{where}.{key[:80]}",
            )
