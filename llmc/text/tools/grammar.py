"""The grammar of an answer that must call a tool, in the model's own format, by the tools' schemas.

It is in llguidance's dialect of Lark: special tokens are written as <[id]>, schemas as %json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llmc.errors import InvalidRequestError
from llmc.json_schema import best_effort, closed, without_annotations
from llmc.text.tools.arguments import is_text
from llmc.text.tools.tool_format import ANY_ID, ToolFormat

MAX_CALLS = 16  # per answer
_WHITE_SPACE = r"(\n[ ]{0,16}|[ ])?"
# Keywords that a schema of arguments written key by key can have, apart from annotations.
_OF_KEYS = {"type", "properties", "required", "additionalProperties"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
# Those that only forbid what `properties` allows, and the compiler's own.
_LIMITS = {
    *("minProperties", "maxProperties", "propertyNames", "dependentRequired", "x-guidance"),
    *("if", "then", "else"),
}
_DEFINITIONS = ("$defs", "definitions")
# Keywords that can't be enforced for an unquoted string.
_OF_TEXT = ("pattern", "format")


def call_grammar(
    form: ToolFormat,
    tools: Mapping[str, Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    parallel: bool,
    answer: str | None = None,
    strict: Collection[str] = (),
) -> str:
    """The grammar, as text. `tools`: the schemas of the functions to choose from, by name.
    `special`: the ids of the format's special tokens. `answer`: the JSON schema of an answer that
    calls no function; None: it must call one. `strict`: the functions whose schemas may have no
    keyword that can't be enforced; those of others are ignored."""
    return _Writer(form, special, strict).grammar(tools, parallel=parallel, answer=answer)


class _Writer:
    def __init__(
        self, form: ToolFormat, special: Mapping[str, int], strict: Collection[str]
    ) -> None:
        self._form = form
        self._special = special
        self._strict = strict
        marks = sorted(map(re.escape, special), key=len, reverse=True)
        self._splitter = re.compile("|".join((*marks, re.escape(ANY_ID))))
        self._rules: list[str] = []

    def grammar(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool, answer: str | None
    ) -> str:
        form = self._form
        # The white space that separates calls from content before them is optional.
        begin = form.section_begin + form.call_begin
        space = begin[: len(begin) - len(begin.lstrip())]
        start = [f"{self._literal(space)}?" if space else "", self._literal(begin.lstrip()), "call"]
        if parallel and form.between is not None and form.between + form.call_begin:
            again = self._literal(form.call_end + form.between + form.call_begin)
            start.append(f"({again} call){{0,{MAX_CALLS - 1}}}")
        start.append(self._literal(form.call_end + form.section_end))
        names = [self._call(index, *tool) for index, tool in enumerate(tools.items())]
        self._rules.insert(0, "calls: " + " ".join(filter(None, start)))
        if answer is None:
            self._rules.insert(0, "start: calls")
        else:
            self._rules[:0] = ["start: calls | answer", f"answer: {_json(json.loads(answer))}"]
        self._rules.append(f"call: {' | '.join(names)}")
        return "\n".join(("%llguidance {}", *self._rules, ""))

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> str:
        form, rule = self._form, f"call_{index}"
        # A function without parameters takes no arguments.
        schema = {"type": "object", **(schema or {"additionalProperties": False})}
        if name not in self._strict:
            schema = best_effort(schema)
        schema = without_annotations(closed(schema))
        if form.kind == "object":
            keys = [
                json.dumps(key, ensure_ascii=False) for key in (form.name_key, form.arguments_key)
            ]
            begin = f"{{{keys[0]}: {json.dumps(name)}, {keys[1]}: "
            parts = [self._literal(begin), _json(schema), self._literal("}")]
        else:
            parts = [self._literal(name + form.middle)]
            parts.append(_json(schema) if form.kind == "named" else self._keys(rule, name, schema))
        self._rules.append(f"{rule}: {' '.join(filter(None, parts))}")
        return rule

    def _keys(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """Arguments key by key, in the schema's order; those that are not required are optional."""
        is_strict = name in self._strict
        allowed = _OF_KEYS | _NOTES | set(_DEFINITIONS) | (set() if is_strict else _LIMITS)
        unknown = sorted(schema.keys() - allowed)
        if unknown:
            raise _fail(
                f"the parameters of {name} have {unknown[0]!r:.80}, which can't be enforced"
            )
        given, needed = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(given, Mapping) or not isinstance(needed, list):
            raise _fail(f"the parameters of {name} are not a JSON schema")
        never = [key for key, one in given.items() if one is False]
        if required := [key for key in never if key in needed]:
            raise _fail(
                f"the parameters of {name} require {required[0]!r:.80}, whose schema is false"
            )
        given = {key: one for key, one in given.items() if key not in never}
        properties = {**given, **{str(key): {} for key in needed if key not in given}}
        of_all = (*_DEFINITIONS, "x-guidance")
        shared = {key: schema[key] for key in of_all if key in schema}
        separator = self._literal(self._form.value_sep)
        # `none`: no key has been written yet; `some`: other keys come before.
        for index, (key, one) in enumerate(properties.items()):
            pair, here = f"{rule}_pair_{index}", f"{rule}_%s_{index}"
            following = f"{rule}_some_{index + 1}"
            written = filter(None, self._pair(pair, key, one, shared, is_strict=is_strict))
            self._rules.append(f"{pair}: {' '.join(written)}")
            optional = key not in needed
            skip = f" | {rule}_none_{index + 1}" if optional else ""
            self._rules.append(f"{here % 'none'}: {pair} {following}{skip}")
            self._rules.append(
                f"{here % 'some'}: ({separator} {pair}){'?' if optional else ''} {following}"
            )
        for kind in ("none", "some"):
            self._rules.append(f'{rule}_{kind}_{len(properties)}: ""')
        return f"{rule}_none_0"

    def _pair(
        self,
        rule: str,
        key: str,
        schema: object,
        shared: Mapping[str, Any],
        *,
        is_strict: bool,
    ) -> Iterator[str]:
        form = self._form
        yield f"{self._literal(form.key_begin)} {_text(key)} {self._literal(form.key_end)}"
        if (form.values_are_json and not form.quote) or not is_text(schema):
            bound = {**schema, **shared} if isinstance(schema, Mapping) else schema
            yield _json(bound)
            yield self._literal(form.value_end)
            return
        assert isinstance(schema, Mapping), "checked by is_text"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = [_text(one) for one in choices if isinstance(one, str)]
            yield f"{self._literal(form.quote)} ({' | '.join(texts)})"
            yield self._literal(form.quote + form.value_end)
            return
        for word in _OF_TEXT:
            if word in schema and is_strict:
                raise _fail(f"{key!r:.80} has {word!r}, which can't be enforced for its text")
        bounds = [schema.get("minLength", 0), schema.get("maxLength", "")]
        if not all(one == "" or (type(one) is int and one >= 0) for one in bounds):
            raise _fail(f"{key!r:.80} has length bounds that are not numbers")
        # The template's own white space comes before the end of the value.
        end = form.quote or form.value_end
        space = end[: len(end) - len(end.lstrip())]
        after = "".join(f"\\x{ord(letter):02x}" for letter in space)
        text = f"/(?s:.{{{bounds[0]},{bounds[1]}}}){after}/"
        yield self._literal(form.quote)
        if end in self._special:  # a special token can't occur inside the text
            yield f"{text} {self._literal(end + form.value_end)}"
            return
        self._rules.append(f"{rule}_text[suffix={_text(end.strip())}]: {text}")
        yield f"{rule}_text"
        yield self._literal(form.value_end if form.quote else "")

    def _literal(self, text: str) -> str:
        """A literal as a sequence of strings, special tokens and ids."""
        parts, place = [], 0
        for found in self._splitter.finditer(text):
            parts.append(text[place : found.start()])
            mark = found[0]
            parts.append("/[a-zA-Z0-9]{9}/" if mark == ANY_ID else f"<[{self._special[mark]}]>")
            place = found.end()
        parts.append(text[place:])
        return " ".join(
            part if index % 2 else _text(part) for index, part in enumerate(parts) if part
        )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: object) -> str:
    if isinstance(schema, Mapping):
        given = schema.get("x-guidance")
        options = {**(given if isinstance(given, dict) else {}), "whitespace_pattern": _WHITE_SPACE}
        schema = {**schema, "x-guidance": options}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _fail(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool calls can't be required of this model: {reason}; use tool_choice auto", param="tools"
    )
