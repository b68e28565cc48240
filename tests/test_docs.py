"""The documents say what the code does: tables, passes, fields and links are checked against it."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line's dependencies are not installed")

from llmc.config import EngineConfig
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline
from llmc.pooling import DraftHead
from llmc.sampling_params import SamplingParams
from llmc.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
_spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
assert _spec is not None and _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    used = [name for path in DOCUMENTS for name in tables.table_names(path.read_text("utf-8"))]
    assert sorted(used) == sorted(tables.tables())
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text == tables.written(text), (
            f"{path.name} is out of date: run `python docs/tables.py`"
        )


def test_a_stale_table_is_noticed() -> None:
    text = text_of("options.md")
    for stale in (text.replace("`--max-num-seqs`", "`--max-seqs`"), text.replace("`2048`", "`1`")):
        assert stale != text and tables.written(stale) == text


@pytest.mark.parametrize("name", list(tables.commands()))
def test_every_flag_is_in_its_section(name: str) -> None:
    sections = text_of("options.md").split("\n## ")
    [own] = [part for part in sections if part.partition("\n")[0] == name]
    [engine] = [part for part in sections if part.startswith("Engine: ")]
    options = tables.commands()[name]
    takes_engine_flags = tables.takes_engine_flags(options)
    shown = own + engine if takes_engine_flags else own
    command = name.removeprefix("llmc").strip()
    assert takes_engine_flags == (f"`{command}`" in engine.partition("\n")[0])
    for option in options:
        for word in [*tables.spellings(option), *tables.environment(option)]:
            assert f"`{word}`" in shown, f"{name} {word}"


@pytest.mark.parametrize("name", list(tables.commands()))
def test_every_number_has_its_unit(name: str) -> None:
    for option in tables.commands()[name]:
        if not option.is_flag and isinstance(option.default, int | float):
            assert option.metavar not in (None, "TEXT"), option.name


def test_every_field_is_in_its_table() -> None:
    text = text_of("options.md")
    for field in [*fields(EngineConfig), *fields(SamplingParams)]:
        if field.init:
            assert f"`{field.name}`" in text, field.name


def rows_of(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of the rows of all tables."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows}


def test_the_sampling_table_has_every_field_with_its_default() -> None:
    rows = rows_of(text_of("options.md"))
    for field in fields(SamplingParams):
        if field.init:
            assert rows[field.name][0] == f"`{field.default!r}`", field.name


def test_the_limits_of_the_server_are_its_defaults() -> None:
    rows = rows_of(text_of("server.md"))
    settings = ServerSettings()
    limits = [field.name for field in fields(ServerSettings) if field.name in rows]
    assert {"max_body_bytes", "body_timeout_s", "shutdown_timeout_s"} <= set(limits)
    for name in limits:
        assert rows[name][0].startswith(f"{getattr(settings, name):,}"), name


def test_the_passes_are_those_of_the_pipeline() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", text_of("passes.md"), re.MULTILINE)
    options = PipelineOptions(block_size=16, max_positions=64, device_type="cpu")
    passes = [*pipeline(options), lower_kernels(prefer=())]
    pools = [p for p in pipeline(replace(options, pooling="mean")) if p.name.endswith("pool")]
    passes += pools
    head = DraftHead(num_taps=3, width=8, vocab_size=9, draft_vocab_size=4, has_id_map=True)
    known = {p.name for p in passes}
    drafting = pipeline(replace(options, taps=(), draft_head=head))
    passes += [p for p in drafting if p.name not in known]
    expected = [(p.name, "yes" if p.required else "no") for p in passes]
    assert rows == expected


def test_linked_files_are_there() -> None:
    checked = 0
    for path in [*ROOT.glob("*.md"), *DOCUMENTS]:
        for target in _LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
                checked += 1
    assert checked > 5


def test_the_python_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.search(r":: Python :: 3\.(\d+)$", line) for line in project["classifiers"])
    minors = [int(match[1]) for match in found if match]
    first, last = minors[0], minors[-1]
    assert minors == [*range(first, last + 1)]
    assert project["requires-python"] == f">=3.{first},<3.{last + 1}"
    assert f"Linux, Python 3.{first} to 3.{last}," in (ROOT / "README.md").read_text("utf-8")
    bases = re.findall(r"FROM python:3\.(\d+)-", (ROOT / "Dockerfile").read_text("utf-8"))
    assert bases and {int(minor) for minor in bases} <= set(minors)


def test_the_torch_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for_tests = project["optional-dependencies"]["test"]
    (torch,) = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(project["dependencies"]))
    (triton,) = re.findall(r"triton>=3\.(\d+),<3\.(\d+);", " ".join(for_tests))
    first, beyond = map(int, torch)
    assert f", torch 2.{first} to 2.{beyond - 1}," in (ROOT / "README.md").read_text("utf-8")
    budgets = (ROOT / "tests" / "kernels").glob("triton_budget_3.*.json")
    assert {path.name for path in budgets} == {
        f"triton_budget_3.{minor}.json" for minor in range(*map(int, triton))
    }
