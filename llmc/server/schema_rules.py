"""Rules in /openapi.json beyond the types of a body's fields, which the server checks itself.

pydantic describes the models (server/protocol.py and its siblings). This module adds nulls, which
count as absent; known but unsupported fields, with their values that have no effect; the structure
of messages, which pydantic does not check; and the limits of the served model.

A schema does not express rules between two fields, or what only a template, a grammar or a
tokenizer can reject: such a request gets a 400 that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from llmc.pooling import PoolingInfo
from llmc.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS
from llmc.server import (
    anthropic_protocol,
    ggml_protocol,
    ollama_protocol,
    responses_protocol,
    turn,
)
from llmc.server.pooling_protocol import MAX_INPUTS
from llmc.server.protocol import MAX_DOCUMENTS, Body
from llmc.server.settings import MAX_PROMPTS
from llmc.server.structured import FORMATS
from llmc.server.tools import CHOICES
from llmc.structured_outputs import MAX_CHOICES
from llmc.text.template_file import RESERVED

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server's schema depends on."""

    models: Sequence[str]
    vocab_size: int
    max_model_len: int
    by_priority: bool = False
    pooling: PoolingInfo | None = None  # the model returns vectors, not text
    reads_nothing: bool = False  # an empty text has tokens: the special ones of every text
    infills: bool = False  # the tokenizer has fill-in-the-middle tokens
    reads_images: bool = False
    reads_documents: bool = False  # the chat template has a place for them
    has_batches: bool = False
    extra_args: Sequence[str] = ()


def _object(required: Sequence[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _const(*values: Any) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _content(*kinds: str, images: Sequence[Schema] = ()) -> Schema:
    text = _object(("type", "text"), type=_const(*kinds), text=TEXT)
    return _any(TEXT, _list(_any(text, *images) if images else text))


NULL: Schema = {"type": "null"}
NONE_GIVEN = _const(None, [])
NAME: Schema = {"type": "string", "minLength": 1}
# JSON in a string. A schema can't require that, but contentMediaType documents it.
ARGUMENTS: Schema = {"type": "string", "contentMediaType": "application/json"}
# A schema can't require that the bytes are an image in a supported format.
DATA_URL: Schema = {"type": "string", "pattern": "^data:[^,]*;base64,[A-Za-z0-9+/]+={0,2}$"}
BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
REFUSAL = _object(("type", "refusal"), type=_const("refusal"), refusal=TEXT)
REASONING = {name: _any(TEXT, NULL) for name in ("reasoning_content", "reasoning", "thinking")}


def _call(arguments: Schema) -> Schema:
    function = _object(("name",), name=NAME, arguments=arguments)
    return _object(("function",), function=function)


def _chat_message(roles: Sequence[str], content: Schema, calls: Schema, tool: Schema) -> Schema:
    plain = [role for role in roles if role not in ("assistant", "tool")]
    text = _object(("type", "text"), type=_const("text"), text=TEXT)
    return _any(
        _object(
            ("role", "content"),
            role=_const(*plain),
            content=content,
            tool_calls=NONE_GIVEN,
            **REASONING,
        ),
        _object(
            ("role",),
            role=_const("assistant"),
            content=_any(content, _list(_any(text, REFUSAL)), NULL),
            tool_calls=_any(_list(calls), NULL),
            **REASONING,
        ),
        tool,
    )


def _chat_messages(images: bool) -> Schema:
    part = _object(
        ("type", "image_url"),
        type=_const("image_url"),
        image_url=_any(DATA_URL, _object(("url",), url=DATA_URL)),
    )
    content = _content("text", images=[part] if images else ())
    tool = _object(
        ("role", "content", "tool_call_id"),
        role=_const("tool"),
        content=content,
        tool_call_id=TEXT,
        tool_calls=NONE_GIVEN,
        **REASONING,
    )
    return _chat_message(turn.ROLES, content, _call(_any(OBJECT, ARGUMENTS, NULL)), tool)


def _ollama_messages(images: bool) -> Schema:
    content = _content("text")
    tool = _object(
        ("role", "content"),
        role=_const("tool"),
        content=content,
        tool_call_id=TEXT,
        tool_calls=NONE_GIVEN,
        **REASONING,
    )
    messages = _chat_message(turn.ROLES, content, _call(_any(OBJECT, ARGUMENTS, NULL)), tool)
    for one in messages["anyOf"]:
        one["properties"]["images"] = _any(NONE_GIVEN, _list(BASE64)) if images else NONE_GIVEN
    return messages


def _anthropic_messages(images: bool) -> Schema:
    text = _object(("type", "text"), type=_const(*anthropic_protocol.TEXT), text=TEXT)
    source = _object(
        ("type", "media_type", "data"), type=_const("base64"), media_type=TEXT, data=BASE64
    )
    image = _object(("type", "source"), type=_const("image"), source=source)
    no_citations = _any(_object(enabled=_const(False, None)), NULL)
    document = _object(
        ("type", "source"),
        type=_const("document"),
        source=_any(
            _object(("type", "data"), type=_const("text"), data=TEXT),
            _object(
                ("type", "content"),
                type=_const("content"),
                content=_content(*anthropic_protocol.TEXT),
            ),
        ),
        title=_any(TEXT, NULL),
        context=_any(TEXT, NULL),
        citations=no_citations,
    )
    found = _object(
        ("type", "source", "title", "content"),
        type=_const("search_result"),
        source=TEXT,
        title=TEXT,
        content=_list(text),
        citations=no_citations,
    )
    seen = [image] if images else []
    result = _object(
        ("type", "tool_use_id"),
        type=_const("tool_result"),
        tool_use_id=TEXT,
        content=_any(TEXT, _list(_any(text, document, found, *seen)), NULL),
    )
    call = _object(
        ("type", "id", "name", "input"), type=_const("tool_use"), id=TEXT, name=NAME, input=OBJECT
    )
    thought = _object(("type", "thinking"), type=_const("thinking"), thinking=TEXT)
    hidden = _object(("type",), type=_const("redacted_thinking"))

    def said_by(role: str, *blocks: Schema) -> Schema:
        content = _any(TEXT, _list(_any(text, *blocks)))
        return _object(("role", "content"), role=_const(role), content=content)

    system = _content(*anthropic_protocol.TEXT)
    return _any(
        said_by("user", result, document, found, *seen),
        said_by("assistant", call, thought, hidden),
        _object(("role", "content"), role=_const("system"), content=system),
    )


def _responses_items(images: bool) -> Schema:
    text = _object(("type", "text"), type=_const(*responses_protocol.TEXT), text=TEXT)
    image = _object(("type", "image_url"), type=_const("input_image"), image_url=DATA_URL)
    summary = _any(_content("reasoning_text", "summary_text"), NULL)

    def said_by(roles: Sequence[str], *parts: Schema) -> Schema:
        return _object(
            ("role", "content"),
            type=_const("message"),
            role=_const(*roles),
            content=_any(TEXT, _list(_any(text, REFUSAL, *parts))),
        )

    return _any(
        *([said_by(["user"], image)] if images else ()),
        said_by(responses_protocol.ROLES),
        _object(
            ("type", "call_id", "name", "arguments"),
            type=_const("function_call"),
            call_id=TEXT,
            name=NAME,
            arguments=ARGUMENTS,
        ),
        _object(
            ("type", "call_id", "output"),
            type=_const("function_call_output"),
            call_id=TEXT,
            output=_content(*responses_protocol.TEXT, images=[image] if images else ()),
        ),
        _object(("type",), type=_const("reasoning"), content=summary, summary=summary),
        _object(("type", "id"), type=_const("item_reference"), id=TEXT),
    )


STOP: Schema = {"type": "string", "minLength": 1, "maxLength": 1024}
JSON_SCHEMA = {
    **_object(("schema",), schema=_any(OBJECT, {"type": "boolean"}), name={}, description={}),
    "additionalProperties": False,
}
JSON_SCHEMA["properties"]["strict"] = _any({"type": "boolean"}, NULL)
RESPONSE_FORMAT = _any(
    {
        **_object(
            ("type", "schema"),
            type=_const(*FORMATS[1:]),
            schema=_any(OBJECT, {"type": "boolean"}),
            json_schema=NULL,
        ),
        "additionalProperties": False,
    },
    {
        **_object(("type",), type=_const(*FORMATS[:2]), json_schema={}),
        "additionalProperties": False,
    },
    {
        **_object(("type", "json_schema"), type=_const(FORMATS[2]), json_schema=JSON_SCHEMA),
        "additionalProperties": False,
    },
)
_FUNCTION = _object(
    ("type", "function"), type=_const("function"), function=_object(("name",), name=TEXT)
)
_NAMED = _object(("type", "name"), type=_const("function"), name=TEXT)
TOOL_CHOICE = _any(
    _const(*CHOICES),
    _FUNCTION,
    _object(
        ("type", "allowed_tools"),
        type=_const("allowed_tools"),
        allowed_tools=_object(
            ("mode", "tools"),
            mode=_const("auto", "required"),
            tools=_list(_FUNCTION, minItems=1),
        ),
    ),
)
TEMPLATE_KWARGS: Schema = {
    "type": "object",
    "propertyNames": {"not": _const(*sorted(RESERVED))},
}
CHOICE = _list(NAME, minItems=1, maxItems=MAX_CHOICES)
# Rules by field, for every body that has the field with this meaning.
FIELDS: Mapping[str, Schema] = {
    "stop": _any(STOP, _list(STOP, maxItems=MAX_STOP_STRINGS)),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "truncate_prompt_tokens": _any(
        _const(-1), {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    ),
    "response_format": RESPONSE_FORMAT,
    "guided_regex": NAME,
    "guided_choice": CHOICE,
    "guided_grammar": NAME,
    "regex": NAME,
    "ebnf": NAME,
    "grammar": NAME,
    "tool_choice": TOOL_CHOICE,
    "chat_template_kwargs": TEMPLATE_KWARGS,
}


def _of_bodies(served: Served) -> Mapping[str, Mapping[str, Schema]]:
    """Rules by body and field."""
    images = served.reads_images
    chat = _list(_chat_messages(images), minItems=1)
    document: Schema = {"type": "object", "additionalProperties": TEXT}
    documents = (
        _list(document, maxItems=MAX_DOCUMENTS) if served.reads_documents else _const(None, [])
    )
    allowed_tools = _object(
        ("type", "mode", "tools"),
        type=_const("allowed_tools"),
        mode=_const("auto", "required"),
        tools=_list(_NAMED, minItems=1),
    )
    return {
        "ChatBody": {"messages": chat, "documents": documents},
        "TemplateBody": {
            "messages": chat if served.pooling is None else NULL,
            "documents": documents,
        },
        "OllamaChatBody": {"messages": _list(_ollama_messages(images))},
        "GenerateBody": {"images": _list(BASE64) if images else NONE_GIVEN},
        "CountTokensBody": {
            "messages": _list(_anthropic_messages(images), minItems=1),
            "system": _content(*anthropic_protocol.TEXT),
            "stop_sequences": _list(STOP, maxItems=MAX_STOP_STRINGS),
        },
        # may be more than fits
        "MessagesBody": {"max_tokens": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
        "ResponsesBody": {
            "input": _any(TEXT, _list(_responses_items(images), minItems=1)),
            "include": _list(_const(*responses_protocol.INCLUDABLE)),
            "tool_choice": _any(TOOL_CHOICE, _NAMED, allowed_tools),
        },
    }


def refine(schemas: dict[str, Schema], bodies: Sequence[type[BaseModel]], served: Served) -> None:
    """Add the rules to `schemas`, pydantic's schemas by model name."""
    limits, of_bodies = _limits(served), _of_bodies(served)
    for body in bodies:
        schema = schemas[body.__name__]
        properties: dict[str, Schema] = schema.get("properties", {})
        # The rules of the body and of its base classes.
        rules: dict[str, Schema] = {}
        for base in reversed(body.__mro__):
            rules |= _rules(base, limits, of_bodies.get(base.__name__, {}))
        for name in list(properties):
            if name in rules:
                properties[name] = _kept(properties[name], rules[name])
        if issubclass(body, Body):
            _allow_nulls(schema, body)
    grammar = schemas.get("StructuredOutputsBody")
    if grammar is not None:
        for name, rule in (("regex", NAME), ("grammar", NAME), ("choice", CHOICE)):
            grammar["properties"][name] = _any(rule, NULL)
    sampling = schemas.get("SamplingBody")
    if sampling is not None:
        _describe_sampling(sampling, limits)
    options = schemas.get("OllamaOptions")
    if options is not None:
        _describe_options(options)


def _rules(
    body: type, limits: Mapping[str, Schema], of_body: Mapping[str, Schema]
) -> Mapping[str, Schema]:
    if body is Body:
        return {**FIELDS, **limits}
    own = dict(of_body)
    if body.__name__ == "CompletionBody":
        own["prompt"] = limits["prompt"]
        own["max_tokens"] = {**limits["max_output_tokens"], "minimum": -1}  # 0: with echo
    if body.__module__ == ollama_protocol.__name__:
        own["model"] = _any(*(limits[key] for key in ("model", "latest")))
        own["prompt"] = TEXT
    if body.__module__ == ggml_protocol.__name__:
        own |= _ggml_rules(body, limits)
    if body.__name__ == "SglangBody":
        own["text"], own["input_ids"] = limits["texts"], limits["ids"]
        own["lora_path"] = limits["model"]
    if body.__name__ == "TokenizeBody":
        own["prompt"] = TEXT
    if body.__name__ in ("InputBody", "ContentBody") and "inputs" in limits:
        own["input"] = limits["inputs"]
    return own


def _ggml_rules(body: type, limits: Mapping[str, Schema]) -> dict[str, Schema]:
    """Rules of the fields of ggml's server: those of a completion, under other names."""
    token, text = limits["token"], NAME
    pair: Schema = {
        "type": "array",
        "prefixItems": [_any(token, TEXT), _any({"type": "number"}, _const(False))],
        "minItems": 2,
        "maxItems": 2,
    }
    mixed = _list(_any(token, text), minItems=1)
    rules: dict[str, Schema] = {
        "logit_bias": _any(
            {"type": "object", "additionalProperties": {"type": "number"}}, _list(pair)
        ),
        "grammar": TEXT,
    }
    if body.__name__ == "GgmlCompletionBody":
        whole = _object(("prompt_string",), prompt_string=text, multimodal_data=NONE_GIVEN)
        several = {"minItems": 1, "maxItems": MAX_PROMPTS}
        rules["prompt"] = _any(text, mixed, whole, _list(_any(text, mixed, whole), **several))
    if body.__name__ == "InfillBody":
        rules["prompt"] = TEXT
    return {name: rule for name, rule in rules.items() if name in getattr(body, "model_fields", {})}


def _limits(served: Served) -> dict[str, Schema]:
    """Rules that depend on the served model."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
    text: Schema = {"type": "string", "minLength": 1}
    length: Schema = {"type": "integer", "minimum": 1, "maximum": served.max_model_len - 1}
    several = {"minItems": 1, "maxItems": MAX_PROMPTS}
    ids = _list(token, minItems=1, maxItems=served.max_model_len)  # all of them with max_tokens 0
    return {
        **_pooling_limits(served, _list(token, minItems=1)),
        "model": _const(*served.models),
        "latest": _const(*(f"{name}:latest" for name in served.models)),
        "token": token,
        "tokens": _list(token),
        "stop_token_ids": _list(token, maxItems=1024),
        "allowed_token_ids": _list(token, minItems=1, maxItems=65536),
        "bad_words": _list(text, maxItems=64),
        "max_tokens": _any(length, _const(-1)),
        "max_completion_tokens": _any(length, _const(-1)),
        "max_output_tokens": length,
        "prompt": _any(text, ids, _list(text, **several), _list(ids, **several)),
        "texts": _any(text, _list(text, **several)),
        "ids": _any(ids, _list(ids, **several)),
        "suffix": TEXT if served.infills else _const(None, ""),
        "priority": {"type": "integer"} if served.by_priority else _const(0),
        "extra_args": {
            "type": "object",
            "properties": {name: {} for name in served.extra_args},
            "additionalProperties": False,
        },
    }


def _pooling_limits(served: Served, ids: Schema) -> dict[str, Schema]:
    """Rules of a model that returns vectors. `ids` has no upper limit, as they can be truncated."""
    pooling = served.pooling
    if pooling is None:
        return {}
    size: Schema = {"type": "integer", "minimum": 1, "maximum": pooling.size}
    cut: Schema = {"type": "integer", "minimum": 1, "maximum": served.max_model_len}
    text = TEXT if served.reads_nothing else NAME
    alone = text if pooling.task == "embed" else TEXT  # others encode the texts of a pair together
    document = {**_object(("text",), text=alone), "additionalProperties": False}
    several = {"minItems": 1, "maxItems": MAX_INPUTS}
    texts = _any(alone, _list(alone, **several))
    return {
        "inputs": _any(text, ids, _list(_any(text, ids), **several)),
        "query": alone,
        "documents": _list(_any(alone, document), **several),
        "text_1": texts,
        "text_2": texts,
        "dimensions": NULL if pooling.classifies else size,
        "task": _const(pooling.task),
        "truncate_prompt_tokens": _any(_const(-1), cut),
    }


def _kept(given: Schema, rule: Schema) -> Schema:
    """The rule, with the field's title and default."""
    return {**rule, **{key: given[key] for key in ("title", "default") if key in given}}


def _allow_nulls(schema: Schema, body: type[Body]) -> None:
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        words = {key: value for key, value in given.items() if key in ("title", "default")}
        rule = {key: value for key, value in given.items() if key not in words}
        if name not in required and rule and NULL not in rule.get("anyOf", ()):
            schema["properties"][name] = {**_any(rule, NULL), **words}
    for name, neutral in body.UNSUPPORTED.items():
        if name not in body.model_fields:
            schema["properties"][name] = {
                **_const(*neutral),
                "description": "not supported; these values have no effect",
            }


def _describe_sampling(schema: Schema, limits: Mapping[str, Schema]) -> None:
    """SGLang's sampling parameters: those of a completion, under other names."""
    properties = schema["properties"]
    for name in ("stop", "logit_bias", "stop_token_ids", "regex", "ebnf"):
        rule = FIELDS.get(name, limits.get(name))
        properties[name] = {**_any(rule, NULL), "title": name} if rule else properties[name]
    properties["max_new_tokens"] = _any(limits["max_output_tokens"], NULL)


def _describe_options(schema: Schema) -> None:
    properties = schema["properties"]
    properties["stop"] = _kept(properties["stop"], FIELDS["stop"])
    for name, given in properties.items():
        properties[name] = _any(given, NULL)
    for name in ollama_protocol.FREE:
        properties[name] = {"description": "no effect"}
    for name, value in ollama_protocol.NEUTRAL.items():
        properties[name] = _const(value, None)
