"""A tiny config for any causal language model in transformers, by rules on field names.

The rules, and exceptions for single classes, are data: bench/configs/coverage.json. Used by
`bench.coverage` for every class and by tests/parity for one class per mechanism.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RULES_FILE = Path(__file__).parents[2] / "bench" / "configs" / "coverage.json"
_NO_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


@functools.cache
def rules() -> Any:
    return json.loads(RULES_FILE.read_text(encoding="utf-8"))


def decoder_types() -> list[str]:
    """Model types of decoder-only text classes; a class with several is listed under its first."""
    skip = rules()["not_decoders"]
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in skip]


def tiny_config(model_type: str, **fields: Any) -> Any:
    """A config with a few thousand parameters and no end token, so that greedy decoding continues.

    `fields` take precedence over the rules. Skips a test whose class this transformers lacks.
    """
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {model_type}")
    config = _shrunk(CONFIG_MAPPING[model_type], "", fields)
    for part in (config, *_parts(config)):
        _shrink_rope(part)
        types = {f.name: str(f.type) for f in dataclasses.fields(part)}
        chosen = rules()["classes"].get(part.model_type, {})
        for name in _NO_TOKENS:
            if "None" in types.get(name, "") and name not in chosen:
                setattr(part, name, None)
    return config


def _shrink_rope(part: Any) -> None:
    """Shrink lengths in rotary parameters, which can be one mapping per layer type."""
    parameters = getattr(part, "rope_parameters", None) or {}
    for rope in (parameters, *(v for v in parameters.values() if isinstance(v, dict))):
        rope.update({name: n for name, n in rules()["lengths"].items() if name in rope})


def _parts(config: Any) -> list[Any]:
    return [getattr(config, name) for name in type(config).sub_configs if hasattr(config, name)]


def _shrunk(cls: Any, role: str, own: Mapping[str, Any]) -> Any:
    """`cls` with every field of a rule shrunk; exceptions for the class are applied last.

    `role` is the field of the outer config that it fills, if any. `own` overrides all rules.
    """
    changes = rules()["classes"].get(cls.model_type, {}) | own
    types = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    small = (rules()[kind] for kind in ("sizes", "lengths", "layers", "limits"))
    sizes = functools.reduce(operator.or_, small) | rules()["nested"].get(role, {})
    # Defaults of the class, not of an instance, which may have replaced None.
    fields: dict[str, Any] = {
        name: value
        for name, value in sizes.items()
        if name in types and getattr(cls, name, None) is not None
    }
    if "kv_lora_rank" in types:  # latent attention expands to a key and a value for every head
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= {n: None if "None" in types[n] else 0 for n in _NO_TOKENS if n in types}
    fields |= _layer_lists(cls, types)
    for name, part in cls.sub_configs.items():
        if part is tf.AutoConfig:
            part = type(getattr(cls(), name))
        if name in types and part is not type(None):
            fields[name] = _shrunk(part, name, {})
            for field, value in changes.get(name, {}).items():
                setattr(fields[name], field, value)
    fields |= {n: v for n, v in changes.items() if n not in cls.sub_configs}
    return cls(**fields)


def _layer_lists(cls: Any, types: dict[str, str]) -> dict[str, Any]:
    """One layer of every kind of the class, and one more of the first kind."""
    lists = {
        name: value
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
        if name in types and isinstance(value := getattr(cls(), name, None), list)
    }
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items()}
    longest = max((len(k) for k in kinds.values()), default=1)
    if longest == 1:
        return {name: value[:2] for name, value in lists.items()}
    count = longest + 1
    fields: dict[str, Any] = {n: [*k, *[k[0]] * count][:count] for n, k in kinds.items()}
    if "mlp_layer_types" in fields:  # dense layers come first
        fields["mlp_layer_types"] = sorted(fields["mlp_layer_types"])
    if "num_hidden_layers" in types:
        fields["num_hidden_layers"] = count
    return fields


def save_random(config: Any, path: Path, *, seed: int = 0) -> Path:
    """A checkpoint with random weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and not name.endswith(("A_log", "norm.weight")):
                parameter.copy_(0.15 * noise)
            else:  # norms, biases, sinks, decays: near the class's initial values
                parameter.add_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("_bias", "_biases")) and buffer.dim() == 1:  # a router's corrections
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(path)
    return path
