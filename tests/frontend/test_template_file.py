"""--chat-template: a file or a text, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import make_scripted

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.frontend import engine_options as engine
from llmc.startup.resolve import check_paths
from llmc.text.chat import render_chat
from llmc.text.template_file import MAX_BYTES, check_template_kwargs, read_template

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_file_or_the_text_itself(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE + "{%- generation -%}x{% endgeneration %}")
    assert read_template(str(path)) == path.read_text()
    assert read_template(TEMPLATE) == TEMPLATE


def test_what_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.jinja' can't be read"):
        read_template(str(tmp_path / "nowhere.jinja"))
    with pytest.raises(ConfigError, match="error in line 2"):
        read_template("{% if x %}\n{% endfor %}")
    large = tmp_path / "large.jinja"
    large.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_template(str(large))


def test_a_mistake_is_found_before_the_model_is_read(tmp_path: Path) -> None:
    mistakes: list[dict[str, Any]] = [
        {"chat_template": "/nowhere.jinja"},
        {"tool_format": "/nowhere.json"},
    ]
    for options in mistakes:
        with pytest.raises(ConfigError, match="'/nowhere.*' can't be read"):
            check_paths(EngineConfig(model=str(tmp_path / "no model"), **options))


def test_it_takes_the_place_of_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_scripted().tokenizer
    monkeypatch.setattr(engine.Tokenizer, "load", lambda *args, **kwargs: tokenizer)
    info: Any = SimpleNamespace(tokenizer_path=tmp_path)
    assert engine.load_tokenizer(EngineConfig(), info) is tokenizer
    own = tokenizer.chat_template
    assert own and own != TEMPLATE
    loaded = engine.load_tokenizer(EngineConfig(chat_template=TEMPLATE), info)
    assert loaded is not None and loaded.chat_template == TEMPLATE


def test_its_variables_are_those_of_all_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_scripted().tokenizer
    monkeypatch.setattr(engine.Tokenizer, "load", lambda *args, **kwargs: own)
    info: Any = SimpleNamespace(tokenizer_path=tmp_path)
    config = EngineConfig(
        chat_template="{{ messages[0].content }} {{ tone }} {{ tools is none }}",
        chat_template_kwargs={"tone": "calm"},
    )
    tokenizer = engine.load_tokenizer(config, info)
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    for given, tone in ((None, "calm"), ({}, "calm"), ({"tone": "loud"}, "loud")):
        ids = render_chat(tokenizer, messages, template_kwargs=given)
        assert tokenizer.decode(ids).split() == ["hi", tone, "True"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tokenize": True, "tools": []}, "must not set tokenize, tools"),
        ([1], "must be a mapping such as"),
        ({1: 2}, "must be a mapping such as"),
    ],
)
def test_variables_that_can_not_be_given(given: Any, why: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no model"), chat_template_kwargs=given)
    with pytest.raises(ConfigError, match=f"chat_template_kwargs {why}"):
        check_paths(config)
    assert check_template_kwargs(None) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("half", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("float16", "float16")],
)
def test_names_of_dtypes(name: str, meant: str) -> None:
    assert EngineConfig(dtype=name).dtype == meant


def test_rows_have_a_limit() -> None:
    with pytest.raises(ConfigError, match="at most 16383, got 1000000000"):
        EngineConfig(max_num_seqs=10**9)
