"""A cached program is not used on a CPU whose instructions call for another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_config

from llmc.compiler.cache import program_key
from llmc.config import EngineConfig
from llmc.kernels.cpu import levels
from llmc.kernels.cpu.levels import AARCH64, X86_64, Level
from llmc.startup.compile import rewrite_options
from llmc.startup.resolve import resolve

ROUNDED = 16  # bits of inputs of integer weights
BITS = {  # by level, of inputs in float32 and in bfloat16
    None: (None, None),
    "x86-64-v3": (ROUNDED, ROUNDED),
    "x86-64-v4-vnni": (ROUNDED, ROUNDED),
    "x86-64-v4-bf16": (ROUNDED, None),
    "x86-64-v4-amx": (ROUNDED, None),
    "aarch64": (None, None),
    "aarch64-bf16": (None, None),
}
NAMED: dict[str | None, Level] = {level.name: level for level in (*X86_64, *AARCH64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_are_rounded_where_the_cpu_has_no_products_for_them(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config("llama", dtype=dtype).save_pretrained(tmp_path)
    device = torch.device("cpu")
    config = EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy")
    source = resolve(config, device)
    assert source.dtype == dtype
    keys: dict[int | None, set[str]] = {}
    for name, bits in BITS.items():
        monkeypatch.setattr(levels, "pick_level", lambda name=name: NAMED.get(name))
        options = rewrite_options(source)
        assert options.pipeline.activation_bits == bits[dtype == torch.bfloat16], name
        key = program_key(source.facts.digest, source.dtype, device, options)
        keys.setdefault(options.pipeline.activation_bits, set()).add(key)
    assert len(keys) == 2 and all(len(same) == 1 for same in keys.values())
    assert keys[None] != keys[ROUNDED]
