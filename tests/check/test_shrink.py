"""Configs made small by what their numbers mean: they build, and short texts cross them all."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmc.check.architecture import shrunken_configs
from llmc.check.shrink import (
    keep_layers,
    num_layers,
    numbers,
    out_of_reach,
    shrink,
)

# Of the classes of bench/configs/coverage.json: one for each way to state windows, layers, heads.
_TYPES = (
    "llama",
    "gpt2",
    "falcon",
    "gpt_oss",
    "gemma3_text",
    "llama4_text",
    "cohere2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "bamba",
    "mamba2",
    "phi3",
    "rwkv",
    "recurrent_gemma",
)


@pytest.mark.parametrize("model_type", _TYPES)
def test_a_default_config_becomes_small_and_no_number_stays_out_of_reach(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    shrunken = next(shrunken_configs(config))  # built on meta by transformers' own class
    assert shrunken.notes == ()
    assert not [n for n in numbers(shrunken.config) if out_of_reach(*n)]
    assert 2 <= num_layers(shrunken.config) <= 8 < num_layers(config.to_dict())


def test_a_model_with_a_part_for_images_becomes_small_too() -> None:
    small = next(shrunken_configs(CONFIG_MAPPING["gemma3"]())).config
    assert small["vision_config"]["num_hidden_layers"] == 1
    assert num_layers(small["text_config"]) == 7
    assert small["text_config"]["sliding_window"] == 8


def test_ratios_stay_and_counts_shrink() -> None:
    small = shrink(
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "layer_types": ["full_attention"] * 4,
            "num_hidden_layers": 4,
            "vocab_size": 128_000,
            "eos_token_id": [127_999],
            "max_position_embeddings": 131_072,
            "quantization_config": {"bits": 4},
            "rope_parameters": {"original_max_position_embeddings": 8192, "factor": 16.0},
        }
    ).config
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert (small["hidden_size"], small["intermediate_size"]) == (512, 1792)
    assert (small["head_dim"], small["num_hidden_layers"]) == (128, 4)
    assert (small["num_experts"], small["num_experts_per_tok"]) == (8, 2)
    assert (small["sliding_window"], small["max_position_embeddings"]) == (8, 256)
    assert small["rope_parameters"] == {"original_max_position_embeddings": 16, "factor": 16.0}
    assert small["vocab_size"] == 512 and small["eos_token_id"][0] < 512
    assert "quantization_config" not in small


def test_only_the_kept_layers_are_listed() -> None:
    config = {
        "num_hidden_layers": 6,
        "layer_types": ["a", "a", "b", "a", "b", "b"],
        "num_kv_shared_layers": 2,
        "mlp_only_layers": [0, 3],
        "per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 32}},
    }
    assert keep_layers(config, [0, 2, 5]) == {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "b"],
        "num_kv_shared_layers": 1,
        "mlp_only_layers": [0],
        "per_layer_config": {"1": {"head_dim": 16}, "2": {"head_dim": 32}},
    }


def test_a_length_of_an_unknown_name_is_told() -> None:
    shrunken = shrink({"hidden_size": 64, "tokens_before_it_forgets": 4096})
    assert shrunken.notes == ("tokens_before_it_forgets = 4096: no compared text is longer",)
