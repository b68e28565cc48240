"""Compressors of windows are known by what they compute: other code of their form is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_configs import tiny_config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from llmc.compiler.build import build
from llmc.compiler.compressors import has_compressors
from llmc.errors import CompileError

HCA, CSA = "heavily_compressed_attention", "compressed_sparse_attention"


def built(kind: str) -> Any:
    config = tiny_config(
        "deepseek_v4", layer_types=[kind], mlp_layer_types=["moe"], num_hidden_layers=1
    )
    return build(config, torch.float32).module


@pytest.mark.parametrize("kind", [HCA, CSA])
def test_what_stands_in_is_proved(kind: str) -> None:
    assert has_compressors(built(kind))


def test_models_without_entries_keep_their_masks() -> None:
    assert not has_compressors(built("sliding_attention"))


def shifted(self: Any, x: Any, position_ids: Any, layer_type: Any = None) -> Any:
    positions = position_ids + (position_ids.shape[1] > 20)
    return _rotated(self, x, positions, layer_type=layer_type)


_rotated = modeling.DeepseekV4RotaryEmbedding.forward
_norm = modeling.DeepseekV4RMSNorm.forward
_scores = modeling.DeepseekV4IndexerScorer.forward


@pytest.mark.parametrize(
    ("kind", "part", "other", "reason"),
    [
        (HCA, modeling.DeepseekV4RotaryEmbedding, shifted, "give different entries"),
        (CSA, modeling.DeepseekV4RMSNorm, lambda m, x: _norm(m, x.cumsum(1)), "different entries"),
        (
            CSA,
            modeling.DeepseekV4IndexerScorer,
            lambda *given: -_scores(*given),
            "show different entries",
        ),
    ],
)
def test_refuses_other_code(
    kind: str, part: Any, other: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "forward", other)
    with pytest.raises(CompileError, match=f"appears to compress windows.*{reason}"):
        built(kind)
