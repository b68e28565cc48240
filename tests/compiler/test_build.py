"""The module that is captured has the dtypes that transformers' loader gives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from tiny_configs import save_random, tiny_config
from tiny_models import load_reference

from llmc.compiler.build import build, materialize_buffers

KEPT = {
    "deepseek_v3": (torch.bfloat16, "e_score_correction_bias"),  # a buffer
    "ernie4_5_moe": (torch.bfloat16, "gate.weight"),
    "gpt_oss": (torch.float16, "norm.weight"),  # in bfloat16 it is not kept
}


@pytest.mark.parametrize("model_type", KEPT)
def test_what_transformers_keeps_in_float32_is_kept(model_type: str, tmp_path: Path) -> None:
    dtype, kept = KEPT[model_type]
    path = save_random(tiny_config(model_type), tmp_path)
    theirs = {n: v.dtype for n, v in load_reference(path, dtype).state_dict().items()}
    assert any(n.endswith(kept) and found == torch.float32 for n, found in theirs.items())
    built = build(tf.AutoConfig.from_pretrained(path), dtype)
    assert {n: v.dtype for n, v in built.module.state_dict().items()} == theirs


def test_complex_buffers_are_computed() -> None:
    config = tf.Llama4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        vision_output_dim=8,
        projector_input_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    theirs = dict(tf.Llama4VisionModel(config).named_buffers())
    with torch.device("meta"):
        module = tf.Llama4VisionModel(config)
    found = materialize_buffers(module)
    assert any(value.is_complex() for value in theirs.values())
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(found[name], value)
