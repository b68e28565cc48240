"""Rows of GGUF files repacked in C++: bit for bit what numpy makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import op_cases
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from packed_rows import KINDS, bits, drawn_rows, empty_parts
from tiny_gguf import write_gguf
from torch import Tensor

from llmc.kernels.cpu import pack_gguf as packer
from llmc.kernels.cpu.pack_gguf import pack_gguf
from llmc.kernels.quantized_linear import Part, Quantization
from llmc.weights.gguf import blocks
from llmc.weights.gguf.blocks import RowOrder, fill_blocks, kept_as, reference_blocks


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    op_cases.require_cpu_ops()


def assert_same(got: dict[Part, Tensor], want: dict[Part, Tensor]) -> None:
    assert got.keys() == want.keys()
    for part, expected in want.items():
        assert got[part].shape == expected.shape and got[part].dtype == expected.dtype
        assert torch.equal(bits(got[part]), bits(expected)), part


def format_of(kind: Type, depth: int) -> Quantization:
    to = kept_as(kind, depth)
    assert to is not None
    return to


def filled(
    rows: Any, kind: Type, to: Quantization, order: RowOrder = slice(None)
) -> dict[Part, Tensor]:
    size, num_bytes = GGML_QUANT_SIZES[kind]
    out = empty_parts(to, len(rows), rows.shape[1] // num_bytes * size)
    fill_blocks(rows, kind, to, out, order)
    return out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_equals_the_reference(kind: Type) -> None:
    depths = (32, 96, 256, 352, 544) if GGML_QUANT_SIZES[kind][0] == 32 else (256, 768)
    for channels in (16, 48):
        for depth in depths:
            to, rows = format_of(kind, depth), drawn_rows(kind, channels, depth)
            out = empty_parts(to, channels, depth)
            assert pack_gguf(rows, kind, out)
            assert_same(out, reference_blocks(rows, kind, to))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_some_rows_in_another_order_and_some_of_their_blocks(kind: Type) -> None:
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rows = drawn_rows(kind, 64, 4 * size)[:, num_bytes : 3 * num_bytes]
    order = np.random.default_rng(1).permutation(64)[:32]
    to = format_of(kind, 2 * size)
    out = empty_parts(to, 32, 2 * size)
    assert pack_gguf(rows, kind, out, order)
    assert_same(out, reference_blocks(rows[order], kind, to))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_packed_in_cpp(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, to = drawn_rows(kind, 32, 512), format_of(kind, 512)
    order = np.arange(31, -1, -1)
    want = reference_blocks(rows[order], kind, to)
    monkeypatch.setattr(blocks, "reference_blocks", None)
    assert_same(filled(rows, kind, to, order), want)


def test_what_cpp_does_not_support_is_packed_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, to = drawn_rows(Type.Q4_K, 32, 512), format_of(Type.Q4_K, 512)
    out = empty_parts(to, 32, 512)
    before = {part: tensor.clone() for part, tensor in out.items()}
    assert not pack_gguf(rows, Type.IQ1_S, out), "a type without a packer"
    apart = Quantization(format="int4", group=32, minimum=True)  # a cut through superblocks
    assert not pack_gguf(rows, Type.Q4_K, empty_parts(apart, 32, 512))
    assert_same(filled(rows, Type.Q4_K, apart), reference_blocks(rows, Type.Q4_K, apart))
    monkeypatch.setattr(packer, "is_loaded", lambda: False)
    assert not pack_gguf(rows, Type.Q4_K, out)
    assert_same(out, before)
    assert_same(filled(rows, Type.Q4_K, to), reference_blocks(rows, Type.Q4_K, to))


@pytest.mark.parametrize(("first", "message"), [(-1, "rows -1 to 14"), (1, "rows 1 to 16")])
def test_a_row_outside_of_the_tensor_is_refused(first: int, message: str) -> None:
    rows, to = drawn_rows(Type.Q4_0, 16, 32), format_of(Type.Q4_0, 32)
    with pytest.raises(IndexError, match=f"{message} are asked of a tensor that has 16"):
        filled(rows, Type.Q4_0, to, np.arange(16) + first)


START = """
import sys
from llmc import LLM
from llmc.weights.gguf import blocks
blocks.reference_blocks = None
with LLM(sys.argv[1], opt_level=0, max_model_len=32, kv_cache_memory=1 << 20):
    print("started")
"""


def test_a_start_loads_the_cpp_ops_before_the_weights(tmp_path: Path) -> None:
    """In a process of its own, as here they are loaded already."""
    path = write_gguf(tmp_path / "m.gguf", "llama", Type.Q4_1)
    command = [sys.executable, "-P", "-c", START, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "started\n", done.stderr
