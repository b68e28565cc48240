"""Derives the work from a config: its linears after merging, bytes and operations of a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.gpu.settings import CONFIGS

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    name: str
    inputs: int
    outputs: int


def read_config(name: str) -> Config:
    config: Config = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return config


def linears(config: Config) -> list[Linear]:
    """The linears of one layer, with q, k, v and gate, up merged; and the output head."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return [
        Linear(name="qkv", inputs=width, outputs=(heads + 2 * kv) * dim),
        Linear(name="o", inputs=heads * dim, outputs=width),
        Linear(name="gate_up", inputs=width, outputs=2 * inner),
        Linear(name="down", inputs=inner, outputs=width),
        Linear(name="head", inputs=width, outputs=config["vocab_size"]),
    ]


def step_bytes(config: Config, itemsize: int) -> int:
    """Weight bytes that a decode step reads: every linear once. It reads only a few rows of the
    embedding table, so the table counts only if it is also the head."""
    *layer, head = linears(config)
    per_layer = sum(x.inputs * x.outputs for x in layer)
    return itemsize * (config["num_hidden_layers"] * per_layer + head.inputs * head.outputs)


def cache_bytes_per_token(config: Config, itemsize: int) -> int:
    layers, kv, dim = (
        int(config[k]) for k in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    return 2 * layers * kv * dim * itemsize


def prefill_flops(config: Config, tokens: int) -> dict[str, float]:
    """Operations of a prompt: linears (the head only for the last token), and causal attention."""
    *layer, head = linears(config)
    per_token = 2 * sum(x.inputs * x.outputs for x in layer) * config["num_hidden_layers"]
    pairs = tokens * (tokens + 1) / 2
    heads = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    return {
        "linear": per_token * tokens + 2.0 * head.inputs * head.outputs,
        "attention": 4.0 * heads * pairs,
    }
