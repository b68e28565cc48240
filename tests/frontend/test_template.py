"""Chat templates rendered without transformers: the same text, and as safe."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

pytest.importorskip("pydantic", reason="the server's dependencies are not installed")

import pydantic
from scripted_engine import make_hf_tokenizer
from tool_templates import STYLES
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from llmc.errors import InvalidRequestError
from llmc.text.chat import render_chat
from llmc.text.known_tokenizer import KnownTokenizer
from llmc.text.template import plain, render_template, renders_alike
from llmc.text.tokenizer import Tokenizer

FRAGMENTS = {
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<\u00e9>' | tojson }}",
    "json options": "{{ {'b': 1, 'a': [1, 2]} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.role }}{% continue %}never{% endfor %}",
    "namespace": "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['k'], 2).k }}",
    "generation": "{% for m in messages %}{% generation %}\n  {% set x = m.content %}{{ x }}\n"
    "{% endgeneration %}{{ x }}|{% endfor %}",
    "blocks": "  {% if add_generation_prompt %}\n  yes\n  {% endif %}\n{{ bos_token }}",
    "refused": "{{ raise_exception('only users: ' ~ messages | length) }}",
    "undefined": "{{ nothing.at.all }}",
    "documents": "{{ documents is none }}{{ documents is defined }}{{ tools is none }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ strftime_now is defined }}",
    "mutation": "{{ messages.append(1) }}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}"
    "{{ show(m) }}{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.parameters | tojson }}{% endfor %}"
    "{% endif %}{% for m in messages %}{% if m.tool_calls is defined %}"
    "{{ m.tool_calls[0].function.arguments | items | list }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", list(FRAGMENTS))
def test_gives_what_transformers_gives(name: str) -> None:
    hf = make_hf_tokenizer()
    if name in ("json", "reasoning") and not copies_reasoning(hf):
        assert not renders_alike(hf, FRAGMENTS[name])  # so transformers renders it
        pytest.skip("this transformers gives templates a message's reasoning under one name only")
    assert renders_alike(hf, FRAGMENTS[name])


def copies_reasoning(hf: Any) -> bool:
    """Whether transformers gives templates a message's reasoning under all names they use."""
    message = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    template = "{{ messages[0].thinking }}"
    return bool(hf.apply_chat_template([message], chat_template=template, tokenize=False) == "hm")


@pytest.mark.parametrize("name", list(STYLES))
def test_gives_what_transformers_gives_for_templates_with_tools(name: str) -> None:
    style = STYLES[name]
    assert renders_alike(make_hf_tokenizer(style.template, style.special_tokens), style.template)


def test_a_difference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages | tojson }}"
    monkeypatch.setattr("llmc.text.template._with_reasoning", lambda message: {**message, "x": 1})
    assert not renders_alike(make_hf_tokenizer(), template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__ }}{{ dict.__class__.__mro__[1].__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_a_template_can_not_leave_the_sandbox(template: str) -> None:
    with pytest.raises((jinja2.TemplateError, TypeError, OverflowError)):
        render_template(template, [{"role": "user", "content": "a"}])


class Color(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


class Level(enum.IntEnum):
    LOW = 3


class Share(float):
    pass


@dataclasses.dataclass
class Point:
    x: Any


class Record(pydantic.BaseModel):
    name: str
    level: Level


PLAIN: list[tuple[Any, Any]] = [
    ([{"a": [1, 2.5, None, True, "x"]}], [{"a": [1, 2.5, None, True, "x"]}]),
    (types.MappingProxyType({Word.YES: ("y",)}), {"yes": ("y",)}),
    ([Word.YES, Level.LOW, Share(0.5), Color.RED], ["yes", 3, 0.5, "<Color>"]),
    ([np.int64(2), np.float32(0.5), np.bool_(False), np.str_("s")], [2, 0.5, False, "s"]),
    (Point(Path("x")), {"x": f"<{type(Path()).__name__}>"}),
    (Record(name="r", level=Level.LOW), {"name": "r", "level": 3}),
    (
        [np.zeros(2), {1}, Point, print],
        ["<ndarray>", "<set>", "<type>", f"<{type(print).__name__}>"],
    ),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN)
def test_only_plain_data_is_given_to_a_template(value: Any, expected: Any) -> None:
    assert repr(plain(value)) == repr(expected)  # np.float64(1.0) == 1.0


def test_objects_become_what_transformers_makes_of_them() -> None:
    theirs = getattr(chat_template_utils, "_plain_template_data", None)
    if theirs is None:
        pytest.skip("this transformers gives templates objects as they are")
    for value, expected in PLAIN:
        assert repr(theirs(value)) == repr(expected)


def test_a_number_that_is_no_python_number_is_named() -> None:
    assert plain([np.longdouble(2)]) == ["<longdouble>"]


@pytest.fixture
def lazily() -> Callable[[Any], tuple[Tokenizer, list[Any]]]:
    def make(hf: Any) -> tuple[Tokenizer, list[Any]]:
        """A tokenizer by its facts, and what was loaded for it."""
        eager, loads = KnownTokenizer.of(hf), []
        facts = type(eager.facts).of(hf, renders_alike=True)

        def load() -> Any:
            loads.append(hf)
            return hf

        return Tokenizer(KnownTokenizer(backend=eager.backend, facts=facts, load=load)), loads

    return make


def test_a_chat_needs_no_transformers_object(lazily: Any) -> None:
    hf = make_hf_tokenizer()
    tokenizer, loads = lazily(hf)
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.render(messages, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text and not loads
    assert tokenizer.tokens(ids) == hf.convert_ids_to_tokens(ids)
    assert tokenizer.ids_of(hf.convert_ids_to_tokens(ids)) == ids
    assert tokenizer.vocabulary() == hf.get_vocab() and not loads
    assert text == hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "transformers'"])
def test_a_template_can_not_call_an_object_in_a_message(
    lazily: Any, is_ours: bool, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    tokenizer, loads = lazily(make_hf_tokenizer("{{ messages[0].file }}"))
    if not is_ours:
        tokenizer.chat_template = tokenizer.chat_template
    messages = [{"role": "user", "content": "a", "file": precious}]
    name = f"<{type(precious).__name__}>"
    assert tokenizer.render(messages) == name
    assert tokenizer.render(messages, chat_template="{{ at.file }}", at=messages[0]) == name
    with pytest.raises(jinja2.TemplateError):
        tokenizer.render(messages, chat_template="{{ messages[0].file.unlink() }}")
    assert precious.exists() and len(loads) == (0 if is_ours else 1)


def test_no_object_in_a_chat_reaches_its_template(tmp_path: Path) -> None:
    """Nor where transformers itself tokenizes, for a text that spells a control token."""
    precious = tmp_path / "precious"
    precious.touch()
    tokenizer = Tokenizer(make_hf_tokenizer("{{ messages[0].file.unlink() }}"))
    for content in ("a", "</s>"):
        message = {"role": "user", "content": content, "file": precious}
        with pytest.raises(InvalidRequestError, match="unlink"):
            render_chat(tokenizer, [message])
    assert precious.exists()


def test_another_template_is_rendered_by_transformers_too(lazily: Any) -> None:
    tokenizer, loads = lazily(make_hf_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert tokenizer.render([{"role": "user", "content": "a"}]) == "a!" and len(loads) == 1
    assert tokenizer.hf.chat_template == tokenizer.chat_template and len(loads) == 1


def test_a_template_for_tools_is_chosen(lazily: Any) -> None:
    hf = make_hf_tokenizer()
    hf.chat_template = {"default": "plain", "tool_use": "{{ tools | length }}"}
    tokenizer, loads = lazily(hf)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.render(messages) == "plain" and tokenizer.chat_template == "plain"
    assert tokenizer.render(messages, tools=[{"type": "function"}]) == "1" and not loads


@pytest.mark.parametrize("as_files", [True, False])
def test_the_only_template_may_be_for_tools(as_files: bool, tmp_path: Path) -> None:
    """As in transformers, conversations with tools have a template then, and others none."""
    template = STYLES["json in tags"].template
    make_hf_tokenizer(chat_template=None).save_pretrained(tmp_path)
    if as_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    else:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "tool_use", "template": template}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "go", "parameters": {}}}]
    hf = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (Tokenizer.load(tmp_path), Tokenizer.load(tmp_path)):  # from the cache
        system = [messages[0], {**messages[1], "role": "system"}]
        want = hf.apply_chat_template(system, tools=tools, tokenize=False)
        ids = render_chat(tokenizer, messages, tools=tools, add_generation_prompt=False)
        assert ids == tokenizer.encode(want, add_special_tokens=False)
        assert tokenizer.chat_template is None
        with pytest.raises(InvalidRequestError, match="named tool_use, only for tools; give the"):
            render_chat(tokenizer, messages)


def test_named_templates_without_a_default_are_listed(lazily: Any) -> None:
    hf = make_hf_tokenizer()
    hf.chat_template = {"rag": "a", "agent": "b"}
    tokenizer, _ = lazily(hf)
    with pytest.raises(InvalidRequestError, match="named agent, rag, none of them the default"):
        render_chat(tokenizer, [{"role": "user", "content": "a"}])


def test_a_second_load_imports_no_transformers(tmp_path: Path) -> None:
    make_hf_tokenizer().save_pretrained(tmp_path / "model")
    code = """
import sys
from llmc.text.chat import render_chat
from llmc.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
ids = render_chat(tokenizer, [{"role": "user", "content": "h\\u00e9llo"}])
print(ids, tokenizer.decode(ids), "transformers" in sys.modules)
"""
    environment = {"LLMC_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    cold, warm = (
        subprocess.run(
            [sys.executable, "-P", "-c", code, str(tmp_path / "model")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for _ in range(2)
    )
    assert cold.endswith("True\n") and warm.endswith("False\n")
    assert cold.split("]")[0] == warm.split("]")[0]
