"""Grammars of answers that must call: whatever they allow is read as calls that fit the schemas."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from llguidance import LLTokenizer
from scripted_engine import VOCAB_WIDTH, make_hf_tokenizer
from tool_templates import STYLES, WEATHER

from llmc.errors import InvalidRequestError
from llmc.structured.grammars import Grammars, Matcher
from llmc.structured_outputs import StructuredOutputsParams
from llmc.text.chat import tool_format
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.grammar import call_grammar
from llmc.text.tools.parse import ToolParser
from llmc.text.tools.tool_format import ToolFormat

EOS = 1
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a b", 'c"d', "<|end|>"]},
        "ok": {"$ref": "#/$defs/yes"},
        "word": {"type": "string", "minLength": 2, "maxLength": 5, "format": "password"},
    },
    "$defs": {"yes": {"type": "boolean"}},
    "additionalProperties": False,
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "time-now": {}, "opt": OPTIONAL}


def fits(name: str, arguments: dict[str, Any]) -> bool:
    match name:
        case "weather":
            days = arguments.get("days")
            is_day = type(days) is int and 0 <= days <= 99
            return is_day and isinstance(arguments["city"], str) and len(arguments) == 2
        case "time-now":
            return arguments == {}
    word = arguments.get("word", "xx")
    return (
        set(arguments) <= {"kind", "ok", "word"}
        and arguments.get("kind", "a b") in OPTIONAL["properties"]["kind"]["enum"]
        and isinstance(arguments.get("ok", True), bool)
        and isinstance(word, str)
        and 2 <= len(word) <= 5
    )


class Model:
    """A style's tokenizer and format, and a "model" that says anything that the grammar allows."""

    def __init__(self, style: str) -> None:
        kind = STYLES[style]
        self.tokenizer = Tokenizer(make_hf_tokenizer(kind.template, kind.special_tokens))
        form = tool_format(self.tokenizer)
        assert form is not None
        self.form: ToolFormat = form
        text = self.tokenizer.hf.backend_tokenizer.to_str()
        self.grammars = Grammars(LLTokenizer(text, n_vocab=VOCAB_WIDTH, eos_token=EOS))

    def start(
        self, tools: dict[str, Any], *, parallel: bool = True, is_strict: bool = True
    ) -> Matcher:
        hf = self.tokenizer.hf
        marks = self.form.marker_tokens(self.tokenizer.special_texts)
        ids = {mark: hf.convert_tokens_to_ids(mark) for mark in marks}
        strict = tools if is_strict else ()
        text = call_grammar(self.form, tools, ids, parallel=parallel, strict=strict)
        return self.grammars.start(StructuredOutputsParams(grammar=text))

    def say(self, matcher: Matcher, chance: random.Random, *, limit: int = 500) -> str | None:
        """An answer, None where it got too long. Ends and quotes are likelier than the rest."""
        ids: list[int] = []
        while not matcher.is_complete:
            mask = matcher.mask()
            words = struct.unpack(f"<{len(mask) // 4}I", mask)
            allowed = [v for v in range(VOCAB_WIDTH) if words[v // 32] >> (v % 32) & 1]
            if EOS in allowed and (len(allowed) == 1 or chance.random() < 0.4):
                break
            ids.append(chance.choice([v for v in allowed if v != EOS]))
            matcher.accept(ids[-1])
            if len(ids) > limit:
                return None
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("style", STYLES)
def test_what_the_grammar_allows_is_read_as_calls(style: str) -> None:
    model, chance, seen = Model(style), random.Random(1), set()
    for _ in range(30):
        text = model.say(model.start(TOOLS), chance)
        if text is None:
            continue
        parser = ToolParser(model.form, TOOLS, streams=False)
        deltas = (parser.push(text), parser.finish())
        assert not any(delta.content for delta in deltas), text
        names = [call.name for delta in deltas for call in delta.calls if call.name is not None]
        texts = [call.arguments for d in deltas for call in d.calls if call.name is None]
        assert len(names) == len(texts) == parser.num_calls >= 1
        for name, arguments in zip(names, texts, strict=True):
            assert fits(name, json.loads(arguments)), text
            seen.add(name)
    assert seen >= {"time-now", "opt"}


@pytest.mark.parametrize("style", ["json in tags", "name then json", "key by key"])
def test_one_call_where_one_is_wanted(style: str) -> None:
    model, chance = Model(style), random.Random(2)
    for _ in range(5):
        text = model.say(model.start({"time-now": {}}, parallel=False), chance)
        assert text is not None
        parser = ToolParser(model.form, TOOLS, streams=False)
        parser.push(text)
        parser.finish()
        assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("style", "schema"),
    [
        ("json in tags", {"properties": {"a": {"type": "nothing"}}}),
        ("json in tags", {"$ref": "#/nothing"}),
        ("key by key", {"properties": {"a": {"type": "nothing"}}}),
        ("key by key", {"properties": {"a": {"type": "string", "pattern": "x"}}}),
        ("key by key", {"properties": {"a": {"type": "string", "maxLength": "1}/ | /x"}}}),
        ("key by key", {"properties": {"a": {"type": "string", "minLength": True}}}),
        ("key by key", {"properties": 1}),
        ("key by key", {"anyOf": []}),
        ("json in tags", {"properties": {"a": {"enum": ["x" * 70_000]}}}),
    ],
)
def test_a_schema_that_can_not_be_followed_is_refused(style: str, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Model(style).start({"f": schema})


@pytest.mark.parametrize("style", ["json in tags", "key by key"])
def test_what_can_not_be_enforced_is_ignored_unless_strict(style: str) -> None:
    """As schemas of MCP servers have it."""
    listed = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"a": listed, "b": {"type": "string", "pattern": "^(?=x)", "maxLength": 3}},
        "required": ["a", "b"],
        "not": {"required": ["c"]},
    }
    model, chance = Model(style), random.Random(3)
    for _ in range(3):
        text = model.say(model.start({"time-now": schema}, is_strict=False, parallel=False), chance)
        assert text is not None
        parser = ToolParser(model.form, TOOLS, streams=False)
        parser.push(text)
        parser.finish()
        assert parser.num_calls == 1
    with pytest.raises(InvalidRequestError):
        model.start({"time-now": schema})
