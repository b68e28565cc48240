"""The documents say what the code does: their tables, passes, fields and links are held to it."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line's dependencies are not installed")

from docs_tables import (
    ROOT,
    commands,
    documents,
    environment,
    table_names,
    tables,
    takes_engine_flags,
    written,
)
from docs_words import SAMPLING

from llmc.config import EngineConfig
from llmc.errors import InvalidRequestError
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.pipeline import PipelineOptions, pipeline
from llmc.sampling_params import SamplingParams

_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    used = [name for path in documents() for name in table_names(path.read_text("utf-8"))]
    assert sorted(used) == sorted(tables())
    for path in documents():
        text = path.read_text(encoding="utf-8")
        assert text == written(text), (
            f"{path.name} is out of date: run `python tests/support/docs_tables.py`"
        )


def test_a_stale_table_is_noticed() -> None:
    text = text_of("options.md")
    for stale in (text.replace("`--max-num-seqs`", "`--max-seqs`"), text.replace("`2048`", "`1`")):
        assert stale != text and written(stale) == text


@pytest.mark.parametrize("name", list(commands()))
def test_every_flag_is_in_its_section(name: str) -> None:
    sections = text_of("options.md").split("\n## ")
    title = f"llmc {name}".strip()
    [own] = [part for part in sections if part.partition("\n")[0] == title]
    [engine] = [part for part in sections if part.startswith("Engine: ")]
    flags = commands()[name]
    shown = own + engine if takes_engine_flags(flags) else own
    assert takes_engine_flags(flags) == (f"`{name}`" in engine.partition("\n")[0])
    for flag in flags:
        if flag.is_option:
            for word in [*flag.spellings, *environment(flag)]:
                assert f"`{word}`" in shown, f"{title} {word}"


def test_every_field_is_in_its_table() -> None:
    text = text_of("options.md")
    for field in [*fields(EngineConfig), *fields(SamplingParams)]:
        if field.init:
            assert f"`{field.name}`" in text, field.name


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_the_ranges_are_those_that_are_checked(name: str) -> None:
    words = SAMPLING[name]

    def make(value: Any) -> SamplingParams:
        return SamplingParams(**{name: value})

    if words.range:
        assert getattr(make(words.low), name) == words.low
        assert getattr(make(words.high), name) == words.high
        assert words.outside, f"{name} has a range and nothing outside it"
    else:
        default = getattr(SamplingParams(), name)
        assert isinstance(default, bool) and getattr(make(not default), name) is not default
    for value in words.outside:
        with pytest.raises(InvalidRequestError) as caught:
            make(value)
        assert caught.value.param == name


def test_the_passes_are_those_of_the_pipeline() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", text_of("passes.md"), re.MULTILINE)
    options = PipelineOptions(block_size=16, max_positions=64, device_type="cpu")
    passes = [*pipeline(options), lower_kernels(prefer=())]
    expected = [(p.name, "yes" if p.required else "no") for p in passes]
    assert rows == expected


def test_linked_files_are_there() -> None:
    checked = 0
    for path in [*ROOT.glob("*.md"), *documents()]:
        for target in _LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
                checked += 1
    assert checked > 5
