"""Passes of users: how they are named, where they run, what names them for the cache."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import tiny_engine
import torch
from tiny_graphs import apply, step, trace
from tiny_models import load_reference, prompts, save_checkpoint
from torch import fx

from llmc.errors import ConfigError
from llmc.passes import user, user_code
from llmc.passes.base import Notes, Pass, graph_pass
from llmc.passes.edit import aten, insert_after
from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline
from llmc.passes.user import digest, user_passes
from llmc.passes.user_names import check_user_code

EXAMPLE = Path(__file__).parents[2] / "examples" / "user_passes.py"
X = step(torch.randn(1, 5, 8), dynamic=1)
FILE = '''
from llmc.passes.base import graph_pass

@graph_pass(place="late")
def nothing(gm, *, strength=1.0):
    """Do nothing.

    Before:
        x
    After:
        x
    """
    return ["rests"]

@graph_pass()
def needs_a_layer(gm, *, layer):
    """Do nothing to a layer.

    Before:
        x
    After:
        x
    """
    return []

number = 3
'''


@graph_pass()
def double(gm: fx.GraphModule) -> Notes:
    """Double what is multiplied.

    Before:
        x * 2
    After:
        x * 2 * 2
    """
    for node in list(gm.graph.nodes):
        if node.target is aten.mul.Tensor:
            insert_after(node, aten.mul.Tensor, 2.0)
    return []


def examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llmc_examples_user_passes", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_reader_gets_what_was_inserted() -> None:
    gm = trace(lambda x: (x * 2).relu() + x * 2, x=X)
    changed, (report,) = apply(gm, double())
    assert report.added == {"aten.mul.Tensor": 2}
    value = torch.ones(1, 5, 8)
    assert torch.equal(fx.Interpreter(changed).run(value), 2 * fx.Interpreter(gm).run(value))


def test_passes_are_taken_from_files_and_modules(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    [found] = user_passes([f"{file}:nothing"])
    assert (found.name, found.place) == ("nothing", "late")
    assert [p.name for p in user_passes(["llmc.passes.fuse_act_mul:fuse_act_mul"])] == [
        "fuse_act_mul"
    ]
    assert user_passes([double()])[0].name == "double"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "is not a pass"),
        ("no_such_module:x", "can't be imported"),
        ("no_such_file.py:x", "does not exist"),
        ("{file}:missing", "has no 'missing'"),
        ("{broken}:x", "can't be imported"),
        ("{raises}:x", "can't be imported: not today"),
        ("{file}:number", "is not a pass"),
        ("{file}:needs_a_layer", "without options: missing a required .*'layer'"),
        (3, "is not a pass"),
    ],
)
def test_what_is_no_pass_is_refused(name: object, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    broken = tmp_path / "broken.py"
    broken.write_text("x = (", encoding="utf-8")
    raises = tmp_path / "raises.py"
    raises.write_text("raise RuntimeError('not today')", encoding="utf-8")
    files = {"file": file, "broken": broken, "raises": raises}
    given = name.format(**files) if isinstance(name, str) else name
    with pytest.raises(ConfigError, match=said):
        user_passes([given])


def test_only_names_that_are_surely_wrong_are_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{FILE}\nraise AssertionError('it was run')\n", encoding="utf-8")
    check_user_code([f"{file}:nothing", "llmc.passes.fuse_act_mul:gone", double()], "pass")
    with pytest.raises(ConfigError, match="has no 'missing'"):
        check_user_code([f"{file}:missing"], "pass")
    file.write_text("from elsewhere import *\n", encoding="utf-8")
    check_user_code([f"{file}:missing"], "pass")


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'double'"):
        user_passes([double(), double()])


def test_installed_passes_come_by_themselves() -> None:
    found = EntryPoint(name="mine", value="llmc.passes.fuse_act_mul:fuse_act_mul", group=user.GROUP)
    broken = EntryPoint(name="mine", value="llmc.passes.gone:gone", group=user.GROUP)
    with mock.patch.object(user_code, "entry_points", return_value=[found]) as asked:
        assert [p.name for p in user_passes([double()])] == ["fuse_act_mul", "double"]
    asked.assert_called_once_with(group="llmc.passes")
    with (
        mock.patch.object(user_code, "entry_points", return_value=[broken]),
        pytest.raises(ConfigError, match="entry point mine .* can't be loaded"),
    ):
        user_passes([])


def test_early_passes_see_the_models_ops_and_late_ones_what_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    options = PipelineOptions(block_size=4, max_positions=64, device_type="cpu")
    names = [p.name for p in pipeline(options, user_passes([f"{file}:nothing", double()]))]
    assert names.index("canonicalize") < names.index("double") < names.index("page_attention")
    assert names[-1] == "nothing"


def test_the_digest_follows_code_and_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")

    def of(**options: object) -> str | None:
        [found] = user_passes([f"{file}:nothing"])
        return digest([Pass(name=found.name, fn=found.fn, doc=found.doc, options=options)])

    first = of(strength=1.0)
    assert first is not None and of(strength=1.0) == first
    assert len({first, of(strength=2.0), of(strength=torch.ones(2)), of(strength=None)}) == 4
    assert of(strength=object()) is None, "nothing names such an option"
    file.write_text(FILE + "# changed", encoding="utf-8")
    user_code._digest_files.cache_clear()
    assert of(strength=1.0) != first


def test_a_pass_that_refers_to_the_caller_is_not_cached() -> None:
    assert digest([examples().tap(layer=0, into=torch.zeros(4, 8))]) is None
    assert digest([examples().steer(layer=0, vector=torch.zeros(8))]) is not None
    assert digest([]) is not None


def test_the_example_taps_a_hidden_state_and_steers(tmp_path: Path) -> None:
    """At -O0 in a real engine, compared with hooks on transformers' module."""
    path = save_checkpoint("llama", tmp_path / "model")
    prompt = list(prompts((9,))[0])
    module = load_reference(path)
    hidden = module(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states[1][0]
    vector, into = torch.full((32,), 0.5), torch.zeros(300, 32)
    passes = [examples().steer(layer=0, vector=vector), examples().tap(layer=0, into=into)]
    running = tiny_engine.start(path, extra_passes=passes)
    assert [r.partition(":")[0] for r in running.started.info.pass_reports][1:3] == ["steer", "tap"]
    tiny_engine.generate(running.engine(), [prompt], 1)
    torch.testing.assert_close(into[: len(prompt)], hidden.detach() + vector)


def test_the_documented_example_is_the_tested_one_and_short() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "inspect.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    source = EXAMPLE.read_text(encoding="utf-8")
    assert shown in source
    definitions = re.findall(r"^@graph_pass.*?^    return \[\]$", source, re.MULTILINE | re.DOTALL)
    assert len(definitions) == 2
    for definition in definitions:
        assert len(definition.splitlines()) <= 20
