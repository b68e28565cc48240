"""Rotary embeddings of several families, as captured from transformers, become one op a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
import transformers as tf
from compiled_config import compile_config
from shared_captures import shared_captures
from tiers import tiered

from llmc.kernels.rope_write import rope_write
from llmc.passes.edit import calls
from llmc.passes.options import PipelineOptions

BASE = {**tiny_models._BASE, "pad_token_id": None}
HEADS = {**BASE, "head_dim": 8}
# family -> its config, whether neighbours turn together, and how many channels turn
FAMILIES: dict[str, tuple[Any, dict[str, Any], bool, int]] = {
    "glm": (tf.GlmConfig, HEADS, True, 4),
    "glm4": (tf.Glm4Config, HEADS, True, 4),
    "cohere": (tf.CohereConfig, HEADS, True, 8),
    "ernie4_5": (tf.Ernie4_5Config, HEADS, True, 8),
    "helium": (tf.HeliumConfig, HEADS, True, 8),
    "stablelm": (tf.StableLmConfig, BASE, False, 2),
    "olmo": (tf.OlmoConfig, BASE, False, 8),
    "qwen3": (tf.Qwen3Config, HEADS, False, 8),
}


def config_of(family: str, **changes: Any) -> Any:
    make, options, _, _ = FAMILIES[family]
    return make(**{**options, "bos_token_id": None, "eos_token_id": None, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiered(FAMILIES, "qwen3", "glm"))
def test_every_layer_is_fused(family: str, dtype: torch.dtype) -> None:
    _, _, interleaved, width = FAMILIES[family]
    with shared_captures():
        program = compile_config(
            config_of(family),
            PipelineOptions(block_size=16, max_positions=64, device_type="cpu"),
            dtype=dtype,
        )
    fused = calls(program.graph.graph, rope_write.overload)
    assert len(fused) == 2
    assert {node.args[10] for node in fused} == {interleaved}
    tables = {node.args[7] for node in fused} | {node.args[8] for node in fused}
    assert len(tables) == 2, "layers share one table of cosines and one of sines"
    assert {tuple(t.meta["val"].shape) for t in tables} == {(64, width)}  # type: ignore[union-attr]


@pytest.mark.parametrize("family", tiered(["glm", "cohere"], "glm"))
def test_interleaved_models_say_what_transformers_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, family, lambda **k: config_of(family, **k))
    path = tiny_models.save_checkpoint(family, tmp_path)
    model = tiny_models.load_reference(path)
    prompts = tiny_models.prompts((11, 3))
    expected = [tiny_models.continue_greedily(model, prompt, 6) for prompt in prompts]
    made = tiny_engine.generate(tiny_engine.start(path).engine(), prompts, 6)
    assert tiny_engine.differences(expected, made) == (0, [])
