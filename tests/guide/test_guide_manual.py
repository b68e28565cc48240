"""The manual says what the code does: its flags, defaults and pass names are the real ones."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from llmc.config import EngineConfig
from llmc.guide.manual import load_manual
from llmc.guide.outside import UNKNOWN_OPTION
from llmc.sampling_params import SamplingParams

MANUAL = load_manual()
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def test_manual_is_large_and_every_question_has_phrasings() -> None:
    assert len(MANUAL.entries) >= 120
    assert all(len(entry.phrasings) >= 6 for entry in MANUAL.entries)
    assert len({entry.answer for entry in MANUAL.entries}) == len(MANUAL.entries)


def test_flags_exist() -> None:
    typer = pytest.importorskip("typer", reason="the command line's dependencies are not installed")
    from llmc.cli import main

    root = typer.main.get_command(main.app)
    commands = [root]
    known = {"--help"}
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    named = {
        flag
        for entry in MANUAL.entries
        if entry.question != UNKNOWN_OPTION
        for text in (entry.question, entry.answer)
        for flag in FLAG.findall(text)
    }
    assert len(named) > 20
    assert named - known == set()


def test_defaults_are_true() -> None:
    config = {f.name: f.default for f in fields(EngineConfig)}
    sampling = {f.name: f.default for f in fields(SamplingParams)}
    stated = [
        match.groups()
        for follow_up in MANUAL.follow_ups
        for answer in follow_up.answers.values()
        if (match := re.match(r"The default of `(?:--)?([\w-]+)` is ([\w.]+?)[.,]( |$)", answer))
    ]
    assert len(stated) >= 10
    for flag, value, _ in stated:
        name = flag.replace("-", "_")
        if name != "host":  # an option of the server, not of the engine
            default = config.get(name, sampling.get(name))
            assert value == str(default) or float(value) == default, flag


def test_passes_are_those_of_the_pipeline() -> None:
    from llmc.passes.pipeline import PipelineOptions, pipeline

    options = PipelineOptions(block_size=16, max_positions=64, device_type="cpu")
    names = [each.name for each in pipeline(options)]
    answer = MANUAL.entry("Which passes are there?").answer
    assert [name for name in re.findall(r"\w+_?\w+", answer) if name in names] == names


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# A\n\n## Q?\n\n- a\n- b\n", "needs one answer line"),
        ("# A\n\n## Q?\n\nYes.\n\n- a\n- A?\n", "is asked by"),
    ],
)
def test_a_broken_manual_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "manual_1.md").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        load_manual(tmp_path)


def test_follow_ups_lean_on_questions_that_exist(tmp_path: Path) -> None:
    table = "| after | answer |\n|---|---|\n| What? | That. |\n"
    (tmp_path / "manual_1.md").write_text(f"# A\n\n## Why?\n\n- a\n- b\n\n{table}")
    with pytest.raises(KeyError, match="What"):
        load_manual(tmp_path)
