"""The program cache: many writers, a full disk, damaged files, and what is left behind."""

from __future__ import annotations

import copy
import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from torch import fx

from llmc.compiler import cache as cache_module
from llmc.compiler.cache import ProgramCache
from llmc.compiler.program import Program
from llmc.compiler.serialize import dump_graph, load_graph
from llmc.passes.inputs import ConstantInput, Shard, WeightInput, input_of

CPU = torch.device("cpu")
KEY = "0" * 32
WRITERS = 8
LOAD = """
import sys, torch
from pathlib import Path
from llmc.compiler.cache import ProgramCache
print("llmc.kernels.image_attention" in sys.modules)
program = ProgramCache(Path(sys.argv[1])).load("0" * 32, torch.device("cpu"))
print(any("image_attention" in str(node.target) for node in program.graph.graph.nodes))
"""


@pytest.fixture(scope="module")
def program(dense: Any) -> Program:
    made: Program = dense.program
    return made


def assert_same(have: Program | None, want: Program) -> None:
    assert have is not None
    nodes, constants = dump_graph(want.graph.graph)
    loaded, tensors = dump_graph(have.graph.graph)
    plain = [{k: v for k, v in n.items() if k != "val"} for n in nodes]  # symbols become numbers
    assert [{k: v for k, v in n.items() if k != "val"} for n in loaded] == plain
    assert constants.keys() == tensors.keys()
    assert all(torch.equal(constants[name], tensors[name]) for name in constants)
    assert (have.vocab_size, have.parameters) == (want.vocab_size, want.parameters)
    assert [str(r) for r in have.reports] == [str(r) for r in want.reports]


def test_what_is_saved_is_loaded(program: Program, tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path)
    assert cache.load(KEY, CPU) is None
    cache.save(KEY, program)
    assert_same(cache.load(KEY, CPU), program)


def test_parts_of_weights_are_loaded_as_saved() -> None:
    shards = [Shard(dim=1, sections=((6, 2), (4, 1)), size=2, rank=rank) for rank in (None, 0, 1)]
    role = WeightInput(parts=("a", "b", "b", "c"), shards=(*shards, None))
    graph = fx.Graph()
    node = graph.placeholder("w")
    node.meta.update(input=role, val=torch.empty(2, 3))
    graph.output(node)
    loaded = load_graph(dump_graph(graph)[0], {}, CPU)
    assert [input_of(n) for n in loaded.graph.nodes if n.op == "placeholder"] == [role]


def test_a_graph_is_loaded_for_the_gpu_of_another_rank() -> None:
    """What it makes itself, such as a mask, must not be on the first rank's GPU."""
    graph = fx.Graph()
    aten = torch.ops.aten
    made = [
        graph.call_function(aten.arange.default, (4,), {"device": torch.device(device)})
        for device in ("cuda", "cuda:0", "cpu")
    ]
    graph.output(tuple(made))
    loaded = load_graph(dump_graph(graph)[0], {}, torch.device("cuda:1"))
    calls = [node for node in loaded.graph.nodes if node.op == "call_function"]
    assert [str(call.kwargs["device"]) for call in calls] == ["cuda:1", "cuda:1", "cpu"]


def test_ops_are_defined_when_a_cached_program_calls_them(program: Program, tmp_path: Path) -> None:
    """No other module that a warm start imports defines this one."""
    from llmc.kernels.image_attention import image_attention

    graph = fx.GraphModule(program.graph, copy.deepcopy(program.graph.graph))
    call = next(node for node in graph.graph.nodes if node.op == "call_function")
    call.target = image_attention.overload
    ProgramCache(tmp_path).save(KEY, replace(program, graph=graph))
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_constants_that_share_memory_are_saved(program: Program, tmp_path: Path) -> None:
    """One tensor in two placeholders is kept once, a view of it as a copy."""
    table = torch.randn(4, 6)
    graph = fx.Graph()
    for name, tensor in {"a": table, "b": table, "half": table[1:3], "turned": table.T}.items():
        graph.placeholder(name).meta["input"] = ConstantInput(tensor=tensor)
    graph.output(())
    cache = ProgramCache(tmp_path)
    cache.save(KEY, replace(program, graph=fx.GraphModule(torch.nn.Module(), graph)))
    loaded = cache.load(KEY, CPU)
    assert loaded is not None
    nodes = loaded.graph.graph.find_nodes(op="placeholder")
    a, b, half, turned = (node.meta["input"].tensor for node in nodes)
    assert a is b
    for have, want in ((a, table), (half, table[1:3]), (turned, table.T)):
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_eight_writers_and_readers_at_once(
    program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader finds a whole entry or none, and nobody warns."""
    together = Barrier(WRITERS)

    def write_and_read(_: int) -> Program | None:
        cache = ProgramCache(tmp_path)
        together.wait(60)
        cache.save(KEY, program)
        return cache.load(KEY, CPU)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(WRITERS) as pool:
        for loaded in pool.map(write_and_read, range(WRITERS)):
            assert_same(loaded, program)
    assert caplog.text == ""
    assert [p.name for p in (tmp_path / "programs").iterdir()] == [KEY]


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_for_tensors(*args: Any, **kwargs: Any) -> Any:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "fails"),
    [
        (tempfile, "mkdtemp", no_space),
        (cache_module, "save_file", no_space_for_tensors),
        (Path, "write_text", no_space),
        (cache_module.os, "rename", no_space),
    ],
)
def test_a_full_disk_is_a_warning(
    owner: Any,
    name: str,
    fails: Callable[..., Any],
    program: Program,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = ProgramCache(tmp_path)
    with caplog.at_level(logging.WARNING), mock.patch.object(owner, name, fails):
        cache.save(KEY, program)
    assert "can't be cached" in caplog.text and "No space left" in caplog.text
    assert list((tmp_path / "programs").iterdir()) == [], "something half written was left"
    cache.save(KEY, program)  # there is room again
    assert_same(cache.load(KEY, CPU), program)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("file", ["graph.json", "constants.safetensors", "digest"])
def test_a_damaged_entry_is_deleted_and_made_again(
    file: str,
    damage: Callable[[Path], None],
    program: Program,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = ProgramCache(tmp_path)
    cache.save(KEY, program)
    damage(tmp_path / "programs" / KEY / file)
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY, CPU) is None
    assert "is rebuilt" in caplog.text
    assert not (tmp_path / "programs" / KEY).exists()
    cache.save(KEY, program)
    assert_same(cache.load(KEY, CPU), program)


def test_what_dead_writers_left_is_removed(program: Program, tmp_path: Path) -> None:
    old, new = (tmp_path / "programs" / f".new-{age}" for age in ("old", "new"))
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    ProgramCache(tmp_path).save(KEY, program)
    assert not old.exists() and new.exists(), "a writer may still be at work on the new one"
