"""`python -m bench.linears` has every format in which a weight is kept, with all of its bytes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import bench_package  # noqa: F401 - before bench
import op_cases
import pytest
import torch

from bench.linears import COLD_BYTES, PLAIN, ROUNDED, STORED, linears
from llmc.kernels.cpu.levels import VARIABLE, supported
from llmc.kernels.quantized_linear import FORMATS
from llmc.weights.gguf.blocks import KEPT, kept_as

CHANNELS, DEPTH = 32, 512


def test_all_formats_are_there() -> None:
    named = {*PLAIN, *STORED}
    assert {"float32", "bfloat16", "float16", *FORMATS} <= named
    assert {kind.name.lower() for kind in KEPT} <= named
    assert {name.partition("/")[0] for name in ROUNDED} == {*STORED}


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_a_type_of_gguf(kind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    op_cases.require_cpu_ops()
    monkeypatch.setattr("bench.linears.COLD_BYTES", COLD_BYTES / 1e6)
    (contestant,) = linears(DEPTH, CHANNELS, [kind.name.lower()])  # type: ignore[attr-defined]
    to = kept_as(kind, DEPTH)  # type: ignore[arg-type]
    assert to is not None
    shapes = {part: to.shape(part, CHANNELS, DEPTH) for part in to.dtypes}
    num_bytes = sum(math.prod(shapes[part]) * to.dtypes[part].itemsize for part in to.dtypes)
    assert contestant.weight_bytes == num_bytes
    result = contestant.run(torch.randn(3, DEPTH).bfloat16(), 0)
    assert result.shape == (3, CHANNELS) and 0 < float(result.float().std()) < 1e3


def test_torch_has_no_more_instructions_than_a_forced_level() -> None:
    """Otherwise the limit would be that of another CPU."""
    if "x86-64-v3" not in {level.name for level in supported()}:
        pytest.skip("the processor does not have AVX2")
    code = (
        "import llmc.kernels.cpu, torch; from bench.torch_level import limit_torch; limit_torch(); "
        "torch.randn(64, 64) @ torch.randn(64, 64); print(torch.backends.cpu.get_cpu_capability())"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, VARIABLE: "x86-64-v3", "PYTHONPATH": root},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["AVX2"]
