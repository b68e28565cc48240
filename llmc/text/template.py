"""Render chat templates without transformers, whose import takes as long as the rest of a start.

The environment is the one that transformers documents for chat templates: an immutable sandbox,
trimmed blocks, `break` and `continue`, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and `{% generation %}` blocks, which mark assistant turns for training and do not
change the text. `renders_alike` compares the two, so a difference between versions is detected.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

Conversation = Sequence[Mapping[str, Any]]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first one that is set wins


def render_template(
    template: str,
    conversation: Conversation,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, str]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation. `variables` are the special tokens and the caller's own variables.

    Raises whatever the template raises (jinja2.TemplateError, TypeError ...). All arguments must be
    `plain` data: a template is untrusted code, and could call methods of objects.
    """
    return _compiled(template).render(
        messages=[_with_reasoning(message) for message in conversation],
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        **(variables or {}),
    )


def plain(value: Any) -> Any:
    """A copy that consists only of JSON types, as newer transformers make it themselves.

    Any other object becomes the name of its type, so that a template has nothing to call.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum or np.str_, whose further methods are left behind
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    import numpy as np  # only here: a wrong path is reported before it is imported

    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return plain(value.item())
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if callable(getattr(value, "model_dump", None)):  # of pydantic
            return plain(value.model_dump())
    return f"<{type(value).__name__}>"


def renders_alike(hf: Any, template: str) -> bool:
    """Whether `render_template` returns what transformers returns, and raises where it raises.

    Both render a few conversations, with and without tools, tool calls and reasoning.
    """
    return all(
        _outcome(lambda options=options: _by_transformers(hf, template, options))
        == _outcome(lambda options=options: _by_us(hf, template, options))
        for options in _probes()
    )


def _by_transformers(hf: Any, template: str, options: Mapping[str, Any]) -> str:
    text: str = hf.apply_chat_template(
        chat_template=template, tokenize=False, return_dict=False, **options
    )
    return text


def _by_us(hf: Any, template: str, options: Mapping[str, Any]) -> str:
    return render_template(template, variables=hf.special_tokens_map, **options)


def _outcome(render: Any) -> str:
    try:
        return f"text: {render()}"
    except Exception as exc:  # templates raise anything
        return f"{type(exc).__name__}: {exc}"


def _probes() -> Iterator[dict[str, Any]]:
    """Arguments of `render_template`, which transformers' `apply_chat_template` takes too."""
    ask: dict[str, Any] = {"role": "user", "content": " How far is <it>?\n"}
    answer = {"role": "assistant", "content": "It's 3 & a half 'miles' \u00e9."}
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    tool = {
        "type": "function",
        "function": {"name": "go", "description": "Goes", "parameters": schema},
    }
    called = {"id": "call12345", "type": "function"}
    call = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should go.",
        "tool_calls": [{**called, "function": {"name": "go", "arguments": {"a": 1.5}}}],
    }
    result = {"role": "tool", "tool_call_id": "call12345", "name": "go", "content": "gone"}
    system = {"role": "system", "content": "Be brief."}
    for prompt in (False, True):
        for messages in ([ask], [ask, answer], [system, ask, answer, ask]):
            yield {"conversation": messages, "add_generation_prompt": prompt}
        for messages in ([ask], [system, ask, call, result], [ask, call, result, answer, ask]):
            yield {"conversation": messages, "add_generation_prompt": prompt, "tools": [tool]}


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without nulls, and with its reasoning under the names that templates use."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: the body, in its own scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` in a template, without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that rejects names with a leading underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # an attribute may be called `self`
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"chat templates can't set the attribute {name!r} of a namespace"
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
