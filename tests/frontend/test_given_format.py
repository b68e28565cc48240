"""--tool-format: what may be given, and that it takes the place of what the template says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import CHAT_TEMPLATE, make_hf_tokenizer, make_scripted
from tool_templates import SCHEMAS, STYLES, TOOLS

from llmc.config import EngineConfig
from llmc.errors import ConfigError
from llmc.frontend import engine_options as engine
from llmc.text.chat import render_chat, tool_format
from llmc.text.tokenizer import Tokenizer
from llmc.text.tools.generic import GENERIC
from llmc.text.tools.given_format import MAX_BYTES, read_tool_format
from llmc.text.tools.parse import ToolParser
from llmc.text.tools.tool_format import ToolFormat

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
ROWS = dict(re.findall(r"^\| (`[^|]*) \| `(\{\"kind\".*\})` \|$", DOCUMENT.read_text(), re.M))
TWO_CALLS = [("weather", {"city": "Oslo", "days": 2}), ("time-now", {})]
ANSWERS = {  # two calls each, as models that are read by these parsers write them
    "`hermes`": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>',
    "`llama3_json`": '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}; '
    '{"name": "time-now", "parameters": {}}',
    "`mistral`": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}, '
    '{"name": "time-now", "arguments": {}}]',
    "`mistral`, newer models": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}'
    "[TOOL_CALLS]time-now[ARGS]{}",
    "`pythonic`": "[weather(city='Oslo', days=2), time-now()]",
}


def test_every_documented_format_has_an_answer() -> None:
    assert list(ROWS) == list(ANSWERS)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("parser", ANSWERS)
def test_documented_formats_read_calls(parser: str, streams: bool) -> None:
    form = read_tool_format(ROWS[parser])
    assert form is not None
    for pieces in ([ANSWERS[parser]], list(ANSWERS[parser])):
        reader = ToolParser(form, SCHEMAS, streams=streams)
        deltas = [*map(reader.push, pieces), reader.finish()]
        assert "".join(delta.content for delta in deltas) == ""
        calls = [call for delta in deltas for call in delta.calls]
        names = [call.name for call in calls if call.name is not None]
        arguments = [
            json.loads("".join(call.arguments for call in calls if call.index == index))
            for index in range(len(names))
        ]
        assert list(zip(names, arguments, strict=True)) == TWO_CALLS


def test_names_texts_and_files(tmp_path: Path) -> None:
    assert read_tool_format("auto") is None
    assert read_tool_format("generic") is GENERIC
    text = '{"kind": "named", "call_begin": "<call>", "middle": ":", "between": null}'
    path = tmp_path / "format.json"
    path.write_text(text)
    form = read_tool_format(text)
    assert form == read_tool_format(str(path))
    assert form is not None and form.between is None and form.call_begin == "<call>"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hermes", "tool format 'hermes' can't be read .*; pass auto, generic"),
        ("{", "the tool format is not valid JSON"),
        ("{}", "must be one of object, named, keyed, got None"),
        ('{"kind": "xml"}', "must be one of object, named, keyed, got 'xml'"),
        ('{"kind": "object", "begin": "x"}', "unknown fields: begin; known ones are kind, "),
        ('{"kind": "object", "call_begin": null}', "call_begin .* must be a string, got None"),
        ('{"kind": "object", "arguments_as_text": 1}', "must be true or false, got 1"),
        ('{"kind": "named", "call_begin": "<call>"}', "kind named needs a mark before the name"),
        ('{"kind": "keyed", "call_begin": "<call>"}', "kind keyed needs a mark before the name"),
    ],
)
def test_mistakes(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tool_format(given)
    with pytest.raises(ConfigError, match=message):  # before the model is looked for
        engine.start(EngineConfig(model="nowhere", tool_format=given))


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    path = tmp_path / "format.json"
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 65536 bytes"):
        read_tool_format(str(path))
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"must be a JSON object, got \[1\]"):
        read_tool_format(str(path))


def test_it_takes_the_place_of_what_the_template_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_scripted(chat_template=STYLES["json in tags"].template).tokenizer
    monkeypatch.setattr(engine.Tokenizer, "load", lambda *args, **kwargs: tokenizer)
    info: Any = SimpleNamespace(tokenizer_path=tmp_path)

    def load(**options: str) -> tuple[ToolFormat | None, str]:
        loaded = engine.load_tokenizer(EngineConfig(**options), info)  # type: ignore[arg-type]
        assert loaded is not None
        asked = [{"role": "user", "content": "And now?"}]
        return tool_format(loaded), loaded.decode(render_chat(loaded, asked, tools=TOOLS))

    learned, prompt = load()
    assert learned is not None and learned is not GENERIC
    given, own_prompt = load(tool_format='{"kind": "object", "call_begin": "<call>"}')
    assert given is not None and given.call_begin == "<call>"
    assert own_prompt == prompt  # the template still describes the tools
    generic, told = load(tool_format="generic")
    assert generic is GENERIC and "You can call these functions:" in told
    assert load() == (learned, prompt)


def test_a_format_goes_with_a_template_that_writes_no_calls() -> None:
    tokenizer = Tokenizer(make_hf_tokenizer("{{ tools | tojson if tools }}" + CHAT_TEMPLATE))
    assert tool_format(tokenizer) is GENERIC
    tokenizer.given_tool_format = read_tool_format(ROWS["`hermes`"])
    text = tokenizer.decode(render_chat(tokenizer, [{"role": "user", "content": "a"}], tools=TOOLS))
    assert '"weather"' in text and "You can call these functions:" not in text
