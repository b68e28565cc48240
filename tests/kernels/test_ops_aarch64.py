"""The C++ ops compiled for aarch64, emulated: every case of every op against its reference.

Needs Debian's packages g++-aarch64-linux-gnu and qemu-user. The emulator holds no torch: see
harness.cpp.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import op_cases
import op_harness
import pytest
import torch
from packed_rows import KINDS, bits, drawn_rows, empty_parts
from torch import Tensor

from llmc.kernels.cpu import compile
from llmc.kernels.cpu.levels import AARCH64, Level
from llmc.kernels.registry import OPS, Case
from llmc.weights.gguf.blocks import kept_as, reference_blocks

PACK_GGUF = SimpleNamespace(  # as harness.cpp takes it
    _schema=torch._C.parse_schema(
        "llmc::pack_gguf(int type, int depth, Tensor rows, Tensor order, Tensor weight, "
        "Tensor scale, Tensor minimum) -> ()"
    )
)
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NAMES = sorted(set(OPS) - op_cases.WITHOUT_CPP)
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module", params=AARCH64, ids=lambda level: level.name)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the ops of a level, linked to a stand-in for torch."""
    for needed in (COMPILER, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed (g++-aarch64-linux-gnu, qemu-user)")
    level: Level = request.param
    folder = tmp_path_factory.mktemp(level.name)
    toolchain = compile.Toolchain(compiler=(COMPILER,), version="")
    assert compile.compile_headers(toolchain, folder, [level]) is None
    sources = {*compile.sources(), Path(__file__).parent / "harness.cpp"}
    objects = {source: folder / f"{source.stem}.o" for source in sources}
    commands = [
        compile.object_command(
            toolchain, s, o, [level], headers=folder if s in compile.sources() else None
        )
        for s, o in objects.items()
    ]
    assert compile.run_all(commands, folder, None) is None
    binary = folder / "harness"
    link = [COMPILER, "-static", "-pthread", *map(str, objects.values()), "-o", str(binary)]
    assert compile.run_all([link], folder, None) is None
    return [EMULATOR, "-cpu", "max", str(binary), level.name]


def answers_of(
    program: list[str], folder: Path, packed: Sequence[tuple[Any, Case]]
) -> list[list[Tensor]]:
    """What the calls return, and leave in their arguments."""
    asked, answered = folder / "calls", folder / "answers"
    asked.write_bytes(op_harness.pack_calls(packed))
    run = subprocess.run(
        [*program, str(asked), str(answered)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return op_harness.unpack_answers(answered.read_bytes(), packed)


def test_equals_the_references(program: list[str], tmp_path: Path) -> None:
    calls = [
        (name, dtype, case)
        for name in NAMES
        for dtype in op_cases.DTYPES
        for case in op_cases.cases(name, dtype)
        if not op_cases.rounds(name, case)  # which is x86's alone
    ]
    packed = [(OPS[name].overload, case) for name, _, case in calls]
    answers = answers_of(program, tmp_path, packed)
    assert len(answers) > 100
    for (name, dtype, case), actual in zip(calls, answers, strict=True):
        try:
            op_cases.assert_same(actual, op_cases.effect(OPS[name].reference, case), dtype)
        except AssertionError as error:
            raise AssertionError(f"{name} of {dtype}: {error}") from None


def test_rows_of_gguf_files_are_packed_as_in_numpy(program: list[str], tmp_path: Path) -> None:
    order, depth = np.random.default_rng(0).permutation(48)[:32], 768
    calls: list[tuple[Any, Case]] = []
    expected = []
    for kind in KINDS:
        to, rows = kept_as(kind, depth), drawn_rows(kind, 48, depth)
        assert to is not None
        expected.append(reference_blocks(rows[order], kind, to))
        out = {"minimum": torch.empty(0), **empty_parts(to, 32, depth)}
        tensors = torch.from_numpy(rows), torch.from_numpy(order)
        filled = out["weight"], out["scale"], out["minimum"]
        calls.append((PACK_GGUF, (int(kind), depth, *tensors, *filled)))
    answers = answers_of(program, tmp_path, calls)
    for kind, answer, want in zip(KINDS, answers, expected, strict=True):
        got = dict(zip(("weight", "scale", "minimum"), answer[2:], strict=True))
        for part, blocks in want.items():
            assert torch.equal(bits(got[part]), bits(blocks)), (kind.name, part)
