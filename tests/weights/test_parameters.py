"""What is known of a model's parameters once the model itself is gone."""

from __future__ import annotations

import torch
import transformers as tf
from tiny_configs import tiny_config
from tiny_models import make_config

from llmc.weights.parameters import describe_parameters


def test_former_names_of_modules() -> None:
    """Before transformers 4.52, the text model of Gemma 3 was the outer module."""
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tiny_config("gemma3"))
    former = describe_parameters(model, {}).former_names
    module = "layers.0.mlp.down_proj"
    assert former[f"language_model.model.{module}"] == f"model.language_model.{module}"
    assert former["language_model.model.embed_tokens"] == "model.language_model.embed_tokens"
    assert describe_parameters(model).former_names == {}


def test_modules_that_always_had_their_names() -> None:
    """Of Mixtral, the experts are another matter."""
    with torch.device("meta"):
        llama, mixtral = (
            tf.AutoModelForCausalLM.from_config(make_config(group, num_hidden_layers=1))
            for group in ("llama", "mixtral")
        )
    assert describe_parameters(llama, {}).former_names == {}
    assert describe_parameters(mixtral, {}).former_names == {
        "model.layers.0.block_sparse_moe.gate": "model.layers.0.mlp.gate"
    }
