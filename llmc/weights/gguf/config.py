"""What a GGUF header says of a model -> the config.json that transformers would have for it.

Names of fields are transformers' own (`GGUF_CONFIG_MAPPING`); rules.json adds what those leave out,
by the fields that a config has. Rotary scaling is read from the metadata and from the tensors that
hold its factors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.blocks import kept_as
from llmc.weights.gguf.reader import GgufHeader, GgufTensorInfo

_FREE = 0.9  # of the weights that keep their bits
_SCALINGS = ("linear", "yarn", "longrope")
# metadata under <architecture>.rope.scaling. -> fields of `rope_parameters`
_SCALING_FIELDS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@cache
def rules() -> Mapping[str, Any]:
    text = files(__package__).joinpath("rules.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def architectures() -> tuple[str, ...]:
    """Those that transformers has a map for, by transformers' names."""
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    return tuple(sorted(name for name in GGUF_CONFIG_MAPPING if name in CONFIG_MAPPING))


def read_config(header: GgufHeader) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, the fields in the names of transformers' map, which its processors ask for)."""
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    name = _known(header.architecture)
    default = CONFIG_MAPPING[name]()
    if getattr(default, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{header.files[0].name} is an encoder-decoder model ({header.architecture}); "
            "llmc serves decoder-only causal language models"
        )
    default = default.get_text_config()
    values = _ours(header)
    fields: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}))
    mapping: Any = GGUF_CONFIG_MAPPING[name]
    for key, field in mapping.items():
        if field not in (None, -1) and key in values:
            fields[field] = values[key]
    known = default.to_dict()
    config = {**fields, "model_type": default.model_type}
    _add_rules(config, values, header, known)
    _one_for_all_layers(config)
    if "token_embd.weight" in header.tensors:
        config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["architectures"] = []
    config["dtype"] = _dtype(header)
    for kind in ("bos", "eos", "padding"):
        number = header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        config[f"{kind.replace('padding', 'pad')}_token_id"] = number
    _add_rotary(config, values, header, known)
    return config, fields


def _known(architecture: str) -> str:
    """transformers' name of an architecture."""
    found = {_squashed(name): name for name in architectures()}.get(_squashed(architecture))
    if found is None:
        raise CheckpointError(
            f"GGUF files of architecture {architecture!r} are not served: transformers has no map "
            f"for it (it has: {', '.join(architectures())}); take the safetensors checkpoint"
        )
    return found


def _squashed(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def _ours(header: GgufHeader) -> dict[str, Any]:
    """Metadata of the architecture, without its prefix."""
    prefix = f"{header.architecture}."
    return {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}


def _add_rules(
    config: dict[str, Any], values: Mapping[str, Any], header: GgufHeader, known: Mapping[str, Any]
) -> None:
    for key, fields in rules()["fields"].items():
        for field in fields:
            if key in values and (field in known or field == "rope_theta"):
                config[field] = values[key]
    for tensor, fields in rules()["flags"].items():
        config.update({f: tensor in header.tensors for f in fields if f in known})
    for tensor, fields in rules()["absent_flags"].items():
        config.update({f: tensor not in header.tensors for f in fields if f in known})


def _one_for_all_layers(config: dict[str, Any]) -> None:
    """A list by layer, where a config has one number: of layers that attend, 0 stands for none."""
    counts = config.get("num_key_value_heads")
    if isinstance(counts, list) and 0 in counts:
        config["layer_types"] = ["full_attention" if n else "conv" for n in counts]
        config["block_auto_adjust_ff_dim"] = False
    for field, value in config.items():
        if field != "layer_types" and isinstance(value, list) and value:
            different = {v for v in value if v != 0}
            if len(different) == 1:
                config[field] = different.pop()


def _dtype(header: GgufHeader) -> str | None:
    """That of the file's weights; None where they are integers, which are served in any dtype.

    bfloat16 where too much of a quantized file has to be widened to be so free.
    """
    kept, sizes = 0, Counter[str]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            count = math.prod(tensor.shape)
            sizes[tensor.type.name] += count
            if kept_as(tensor.type, *tensor.shape[-2:]) is not None:
                kept += count
    if set(sizes) <= {"F32"}:
        return "float32"
    if set(sizes) <= {"F16", "F32"}:
        return "float16"
    return None if kept > _FREE * sizes.total() else "bfloat16"


def _add_rotary(
    config: dict[str, Any], values: Mapping[str, Any], header: GgufHeader, known: Mapping[str, Any]
) -> None:
    rope = known.get("rope_parameters") or {}
    if not rope:
        return
    if "partial_rotary_factor" in rope and (width := values.get("rope.dimension_count")):
        heads, hidden = values.get("attention.head_count"), values.get("embedding_length")
        head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
        if head_dim:
            config["partial_rotary_factor"] = width / head_dim
    scaling = _scaling(config, values, header)
    if scaling:
        config["rope_scaling"] = scaling
    elif rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = None  # the class's own default is one checkpoint's


def _scaling(
    config: Mapping[str, Any], values: Mapping[str, Any], header: GgufHeader
) -> dict[str, Any]:
    own = {k.removeprefix("rope.scaling."): v for k, v in values.items() if "rope.scaling." in k}
    scaling = {field: own[key] for key, field in _SCALING_FIELDS.items() if key in own}
    kind = own.get("type", "none")
    if "rope_factors_long.weight" in header.tensors:
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        return {
            **scaling,
            "rope_type": "longrope",
            "long_factor": _numbers(header.tensors["rope_factors_long.weight"]),
            "short_factor": _numbers(header.tensors["rope_factors_short.weight"]),
        }
    if "rope_freqs.weight" in header.tensors:  # frequencies are divided by them at every length
        factors = _numbers(header.tensors["rope_freqs.weight"])
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    if kind == "none" or scaling.get("factor") in (None, 0, 1.0):
        return {}
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{header.files[0].name} scales rotary positions by {kind!r}, of which llmc reads "
            f"{', '.join(_SCALINGS)}"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": scaling["factor"]}
    return {**scaling, "rope_type": kind}


def _numbers(tensor: GgufTensorInfo) -> list[float]:
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{tensor.name} is no list of float32 numbers")
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    return np.frombuffer(data, "<f4").tolist()  # type: ignore[no-any-return]


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """End tokens and sampling parameters, under the names of generation_config.json."""
    data = header.metadata
    ends = [data.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, kinds = data.get("tokenizer.ggml.tokens"), data.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        marks = set(rules()["end_of_turn"])
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends += [i for i, (token, kind) in pairs if kind == 3 and token in marks]
    found = [e for e in ends if isinstance(e, int) and not isinstance(e, bool)]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(found))} if found else {}
    for key, field in rules()["sampling"].items():
        if isinstance(data.get(key), int | float):
            config[field] = data[key]
    return config


def parsed(config: dict[str, Any]) -> Any:
    """As transformers reads it; CheckpointError where it can't."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**config)
    except Exception as e:  # nearly every type is raised here, from KeyError to validation errors
        raise CheckpointError(f"the metadata describes no usable model: {reason_of(e)}") from e
