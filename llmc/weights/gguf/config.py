"""The model description in a GGUF header -> the config.json that transformers would have for it.

Fields are named by transformers' `GGUF_CONFIG_MAPPING`; rules.json adds those that it lacks, if a
config has them. Rotary scaling is read from the metadata and from the tensors with its factors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from statistics import NormalDist
from typing import Any

import numpy as np

from llmc.errors import CheckpointError, reason_of
from llmc.weights.gguf.blocks import kept_as
from llmc.weights.gguf.reader import GgufHeader, GgufTensorInfo, shown
from llmc.weights.gguf.rules import rule_of, rules, squashed

_FREE = 0.9  # share of the weights that stay quantized, above which any dtype is suitable
_SCALINGS = ("linear", "yarn", "longrope")
# metadata under <architecture>.rope.scaling. -> fields of `rope_parameters`
_SCALING_FIELDS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_COUNT = re.compile(r"_(count|count_kv|length)$")
_ROTARY = ("rope_theta", "rope_local_base_freq")  # accepted by configs, but stored elsewhere
_LAYER_KINDS = {  # fields with a kind for each layer -> the rules that tell the kinds
    "layer_types": "layers", "mlp_layer_types": "mlp_layers", "indexer_types": "indexer_layers",
}  # fmt: skip
_ROPE_THETA = 10000.0  # if a file does not set it
_PENALTY_LAST_N = 64  # the same
_UNUSED_FREQUENCY = 1e20  # a frequency divided by this or more does not turn anything
_COMMON = {  # for processors of architectures that transformers has no map for
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def read_config(header: GgufHeader) -> dict[str, Any]:
    """The contents of config.json."""
    from transformers import CONFIG_MAPPING

    rule = rule_of(header)
    default = CONFIG_MAPPING[rule["as"]]()
    if getattr(default, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{header.files[0].name} is an encoder-decoder model ({header.architecture}); "
            "llmc serves decoder-only causal language models"
        )
    default = default.get_text_config()
    values = _ours(header)
    fields = _fields(header.architecture, values)
    known = default.to_dict()
    known |= {other: known.get(name) for other, name in default.attribute_map.items()}
    config = {**fields, "model_type": default.model_type}
    if "head_dim" in known:
        config |= _head_dim(values)
    elif _has_own_head_dim(values, known):
        config["head_dim"] = values["attention.key_length"]
    _add_flags(config, values, header, known)
    config |= deepcopy(rule.get("values", {}))
    _add_rules(config, values, header, known)
    for key, paths in rule.get("fields", {}).items():
        for path in paths if key in values else ():
            _put(config, path, values[key])
    for field, (one, operation, other) in rule.get("computed", {}).items():
        config[field] = _computed({**config, **values}, one, operation, other)
    _add_layers(config, values, known, header)
    _add_by_window(config, values, rule)
    if "token_embd.weight" in header.tensors:
        config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    if "cls.output.weight" in header.tensors:
        config["num_labels"] = header.tensors["cls.output.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config.setdefault("architectures", [])
    config["dtype"] = _dtype(header)
    for kind in ("bos", "eos", "padding"):
        number = header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if number is None and "class" in rule:
            continue  # encoders' configs may require one, which is never used
        config[f"{kind.replace('padding', 'pad')}_token_id"] = number
    _add_rotary(config, values, header, known)
    sees_later = "class" in rule or config.get("use_bidirectional_attention")
    if values.get("attention.causal") is False and not sees_later:
        raise CheckpointError(
            f"{header.files[0].name} is a {header.architecture} model whose tokens attend to later "
            "ones too (attention.causal is false); llmc serves this architecture only as a causal "
            "model"
        )
    return config


def _fields(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by transformers' map of the architecture, or by common names if it has none."""
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    names = {squashed(name): name for name in GGUF_CONFIG_MAPPING}
    name = names.get(squashed(architecture))
    mapping: Any = GGUF_CONFIG_MAPPING[name] if name else _COMMON
    fields = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name or "", {}))
    for key, field in mapping.items():
        if field not in (None, -1) and key in values:
            fields[field] = values[key]
    return fields


def _head_dim(values: Mapping[str, Any]) -> dict[str, int]:
    """The default if a file does not set it; a config's own default does not apply."""
    heads, hidden = values.get("attention.head_count"), values.get("embedding_length")
    if type(heads) is int and type(hidden) is int and heads > 0:
        return {"head_dim": hidden // heads}
    return {}


def _has_own_head_dim(values: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether heads have a size of their own: models read `head_dim` even if their config class has
    no such field. Keys of a latent have two sizes, which other fields state."""
    own = values.get("attention.key_length")
    default = _head_dim(values).get("head_dim")
    return type(own) is int and own != default and "kv_lora_rank" not in known


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path."""
    *parents, field = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[field] = value


def _computed(
    values: Mapping[str, Any], one: str | float, operation: str, other: str | float
) -> float:
    """Combine two numbers. Each is a constant, or the first key that there is among those separated
    by bars, of the metadata or a field of the config; for a list by layer, its minimum."""

    def number(keys: str | float) -> Any:
        if not isinstance(keys, str):
            return keys
        found = next((values[key] for key in keys.split("|") if key in values), None)
        return min(found, default=None) if isinstance(found, list) else found

    left, right = number(one), number(other)
    if not all(type(n) in (int, float) and n > 0 for n in (left, right)):
        raise CheckpointError(
            f"the metadata has {shown(left)} as {one} and {shown(right)} as {other}, but "
            "both should be positive"
        )
    divided = left / right if isinstance(left, float) else left // right
    root = left / math.sqrt(right)
    results: dict[str, float] = {
        "/": divided, "/ root of": root, "-": left - right, "+": left + right
    }  # fmt: skip
    return results[operation]


def _ours(header: GgufHeader) -> dict[str, Any]:
    """The architecture's metadata without its prefix; float32 values as their shortest decimals.

    A file that states no number of key heads has one for each head of queries: a config's own
    default does not apply.
    """
    prefix = f"{header.architecture}."
    values = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    values["block_count"] = _layers(values, header)
    if values.get("feed_forward_length") == 0:  # a model without feed-forward layers
        del values["feed_forward_length"]
    if "attention.head_count" in values:
        values.setdefault("attention.head_count_kv", values["attention.head_count"])
    return {k: _plain(k, v) for k, v in values.items()}


def _plain(key: str, value: Any) -> Any:
    """A count by layer becomes one number if all layers with a nonzero count have the same."""
    if isinstance(value, list) and _COUNT.search(key) and all(type(v) is int for v in value):
        different = set(value) - {0}
        return different.pop() if len(different) == 1 else value
    return _decimal(value) if isinstance(value, float) else value


def _layers(values: Mapping[str, Any], header: GgufHeader) -> int:
    """The number of layers: at most as many as the file has tensors for, whatever it claims."""
    stated = values.get("block_count")
    ahead = values.get("nextn_predict_layers", 0)  # used only for speculative decoding
    mark = rule_of(header).get("ahead")  # in their names, where a file may count but not have them
    if mark and not any(mark in name for name in header.tensors):
        ahead = 0
    named = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if type(stated) is not int or type(ahead) is not int or not 0 <= ahead < stated <= named:
        raise CheckpointError(
            f"{header.files[0].name} states {shown(stated)} layers, but has tensors for {named}"
        )
    return stated - ahead


def _decimal(value: float) -> float:
    with np.errstate(over="ignore"):
        short = np.float32(value)
    return float(str(short)) if short == value else value


def _add_flags(
    config: dict[str, Any], values: Mapping[str, Any], header: GgufHeader, known: Mapping[str, Any]
) -> None:
    for names, fields in rules()["flags"].items():
        is_there = any(name in header.tensors for name in names.split("|"))
        config.update({f: is_there for f in fields if f in known})
    for tensor, fields in rules()["absent_flags"].items():
        config.update({f: tensor not in header.tensors for f in fields if f in known})
    for field, (present, absent) in rules()["layer_flags"].items():
        if field in known:
            layers = (
                name.removesuffix(present) for name in header.tensors if name.endswith(present)
            )
            config[field] = any(f"{layer}{absent}" not in header.tensors for layer in layers)
    for key, field in rules()["list_flags"].items():
        if field in known:
            config[field] = isinstance(values.get(key), list)


def _add_rules(
    config: dict[str, Any], values: Mapping[str, Any], header: GgufHeader, known: Mapping[str, Any]
) -> None:
    for tensor, field in rules()["rows"].items():
        if tensor in header.tensors and field in known:
            config[field] = header.tensors[tensor].shape[0]
    for key, field in rules()["quantiles"].items():
        if key in values and field in known:
            config[field] = [NormalDist().cdf(value) for value in values[key]]
    for key, fields in rules()["fields"].items():
        for field in fields:
            if key in values and (field in known or field in _ROTARY):
                config[field] = values[key]


def _add_layers(
    config: dict[str, Any], values: Mapping[str, Any], known: Mapping[str, Any], header: GgufHeader
) -> None:
    """Fields that depend on the layer: a layer's kind, or a period.

    A window of 0 means no window.
    """
    layers = values["block_count"]
    rule = rule_of(header)
    for field, name in _LAYER_KINDS.items():
        if kinds := rule.get(name):
            config[field] = [_kind(header, i, kinds) for i in range(layers)]
    for field, tensor in rule.get("periods", {}).items():
        found = [i for i in range(layers) if f"blk.{i}.{tensor}" in header.tensors]
        first, second = (*found, layers, layers)[:2]
        config[f"{field}_offset"] = first
        config[f"{field}_period"] = max(second - first, first + 1)
    for key, (field, by_layer) in rule.get("by_layer", {}).items():
        if isinstance(counts := values.get(key), list) and counts:
            config |= {field: max(counts), by_layer: counts[:layers]}
    for field, (key, known_as, other) in rule.get("where", {}).items():
        if isinstance(flags := values.get(key), list):
            own = config.get(known_as, _ROPE_THETA)
            config[field] = [own if flag else other for flag in flags[:layers]]
    pattern = values.get("attention.sliding_window_pattern")
    if pattern is None and values.get("attention.sliding_window"):
        pattern = rule.get("window_pattern")  # not stored in files
    if isinstance(pattern, int) and pattern:
        full = 0 if rule.get("full_layer_first") else pattern - 1  # one of every `pattern` layers
        pattern = [i % pattern != full for i in range(layers)]
    if isinstance(pattern, list) and "layer_types" in known:
        config["layer_types"] = [
            "sliding_attention" if windowed else "full_attention" for windowed in pattern[:layers]
        ]
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None


def _add_by_window(
    config: dict[str, Any], values: Mapping[str, Any], rule: Mapping[str, Any]
) -> None:
    """Numbers listed by layer, if windowed layers have one and all others have another."""
    for key, fields in rule.get("by_window", {}).items():
        numbers, kinds = values.get(key), config.get("layer_types")
        if not isinstance(numbers, list) or kinds is None:
            continue
        for field, kind in zip(fields, ("sliding_attention", "full_attention"), strict=True):
            found = {n for n, k in zip(numbers, kinds, strict=False) if k == kind}
            if len(found) != 1:
                raise CheckpointError(
                    f"the metadata has {shown(numbers)} as {key}, which is not one number for the "
                    "layers with a window and one for the others"
                )
            config[field] = found.pop()


def _kind(header: GgufHeader, layer: int, kinds: Mapping[str, str]) -> str:
    """A layer's kind, by a tensor that only this kind has; "" is the key for the others."""
    found = (k for tensor, k in kinds.items() if f"blk.{layer}.{tensor}" in header.tensors)
    return next(found, kinds[""])


def _dtype(header: GgufHeader) -> str | None:
    """The dtype of the file's weights; None if they are quantized, which allows any dtype.

    bfloat16 if too much of a quantized file has to be dequantized for that.
    """
    kept, sizes = 0, Counter[str]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1 and tensor.type.name != "I32":
            count = math.prod(tensor.shape)
            sizes[tensor.type.name] += count
            if kept_as(tensor.type, tensor.shape[-1]) is not None:
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
    config.setdefault("rope_theta", _ROPE_THETA)
    of_kinds = config.get("rope_parameters", {}).values()
    partial = [k for k in of_kinds if isinstance(k, dict) and k.get("rope_type") == "proportional"]
    if partial and "rope_freqs.weight" in header.tensors:
        share = _turned(_numbers(header.tensors["rope_freqs.weight"]))
        for kind in partial:
            kind["partial_rotary_factor"] = share
        return
    head_dim = config.get("head_dim") or _head_dim(values).get("head_dim")
    kinds = config.get("rope_parameters", {})
    if head_dim and (width := values.get("rope.dimension_count")):
        windowed = values.get("rope.dimension_count_swa", width)
        for kind in (k for k in rope if k in kinds):
            share = (windowed if kind == "sliding_attention" else width) / head_dim
            kinds[kind]["partial_rotary_factor"] = share
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = width / head_dim
    scaling = _scaling(config, values, header)
    if scaling.get("rope_type") == "yarn" and "truncate" in rope:
        scaling["truncate"] = rope["truncate"]  # not stored in files
    if scaling and "full_attention" in kinds:
        kinds["full_attention"] |= scaling
    elif scaling:
        config["rope_scaling"] = scaling
    elif rope.get("rope_type", "default") != "default":
        # the config class's default is that of one particular checkpoint
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.get("rope_theta")}


def _turned(factors: list[float]) -> float:
    """The share of the frequencies that are used; the others are divided by a huge number."""
    used = [factor for factor in factors if factor < _UNUSED_FREQUENCY]
    if set(used) != {1.0}:
        raise CheckpointError(
            f"rope_freqs.weight has {shown(factors)}; each is either used as it is or not"
        )
    return len(used) / len(factors)


def _scaling(
    config: Mapping[str, Any], values: Mapping[str, Any], header: GgufHeader
) -> dict[str, Any]:
    own = {k.removeprefix("rope.scaling."): v for k, v in values.items() if "rope.scaling." in k}
    scaling = {field: own[key] for key, field in _SCALING_FIELDS.items() if key in own}
    for key, fields in rule_of(header).get("scaling", {}).items():
        scaling |= dict.fromkeys(fields, own[key]) if key in own else {}
    if "factor" not in scaling and "rope.scale_linear" in values:  # of files from 2023
        scaling["factor"] = values["rope.scale_linear"]
    kind = own.get("type", "linear")  # the format's default
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
            f"{header.files[0].name} scales rotary positions by {shown(kind)}; llmc supports "
            f"{', '.join(_SCALINGS)}"
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": scaling["factor"]}
    if multiplier := own.get("yarn_log_multiplier"):
        # some architectures store a tenth of it, and use one number for both
        tenths = rule_of(header).get("log_multiplier_tenths", False)
        scaling["mscale_all_dim"] = round(multiplier * 10, 6) if tenths else multiplier
        scaling["mscale"] = scaling["mscale_all_dim"] if tenths else 1.0
    scaling |= {f: values[key] for key, f in rules()["with_scaling"].items() if key in values}
    return {**scaling, "rope_type": kind}


def _numbers(tensor: GgufTensorInfo) -> list[float]:
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{tensor.name} is not a list of float32 numbers")
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    return np.frombuffer(data, "<f4").tolist()  # type: ignore[no-any-return]


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """End tokens and sampling parameters, under the names of generation_config.json."""
    data = header.metadata
    ends = [data.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = data.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        known = set(rules()["end_of_turn"])
        marked = {t: i for i, t in enumerate(tokens) if isinstance(t, str) and t in known}
        ends += [marked[mark] for mark in rules()["end_of_turn"] if mark in marked]
        for mark, others in rules()["end_of_part"].items():  # one message of a turn, not the turn
            if any(other in marked for other in others):
                ends = [e for e in ends if e != marked.get(mark)]
    found = [e for e in ends if isinstance(e, int) and not isinstance(e, bool)]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(found))} if found else {}
    for key, field in rules()["sampling"].items():
        if isinstance(data.get(key), int | float) and math.isfinite(data[key]):
            config[field] = data[key]
    if "repetition_penalty" in config:
        config.setdefault("repeat_last_n", _PENALTY_LAST_N)
    return config


def parsed(config: dict[str, Any]) -> Any:
    """The config as parsed by transformers; CheckpointError if it can't be."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**config)
    except Exception as e:  # nearly every type is raised here, from KeyError to validation errors
        raise CheckpointError(
            f"the metadata does not describe a usable model: {reason_of(e)}"
        ) from e
