"""The launches that are compiled ahead of time: each op at shapes that stand for real use.

Plans are made from meta tensors, so shapes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.triton import (
    act_mul,
    expert_linear,
    norm,
    paged_attention,
    process_logits,
    rope_write,
    sample,
    write_kv,
)
from llmc.kernels.triton.launch import Launch, Plan

BF16 = torch.bfloat16
VOCAB = 151936


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def attention(
    tokens: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int = 0,
    *,
    dtype: torch.dtype = BF16,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    max_blocks: int = 2048,
) -> Plan[Tensor]:
    return paged_attention.plan(
        meta(tokens, heads, dim, dtype=dtype),
        meta(64, kv_heads, 16, dim, dtype=dtype),
        meta(64, kv_heads, 16, v_dim or dim, dtype=dtype),
        ints(rows + 1),
        ints(rows),
        ints(rows, max_blocks),
        dim**-0.5,
        window,
        chunk,
        softcap,
        meta(heads, dtype=dtype) if sinks else None,
        floats(heads) if alibi else None,
    )


def caches(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return meta(64, 8, 16, 128), meta(64, 8, 16, 128), longs(tokens)


def rope(*, interleaved: bool, normed: bool) -> Plan[Tensor]:
    weight = meta(128) if normed else None
    key = meta(64, 8, 128)
    tables = floats(4096, 128), floats(4096, 128), longs(64)
    return rope_write.plan(
        meta(64, 32, 128), key, key, weight, weight, 1e-6, 0.0, *tables, interleaved, *caches(64)
    )


def logits_tables() -> Plan[Tensor]:
    rows = 256
    return process_logits.plan(
        meta(128, VOCAB),
        longs(128),
        ints(128),
        ints(rows, 40960),
        ints(rows),
        floats(rows),
        floats(rows),
        floats(rows),
        ints(rows, 300),
        floats(rows, 300),
        ints(rows, 300),
        meta(rows, dtype=torch.bool),
        ints(rows, VOCAB // 32),
    )


def sampler() -> Plan[Tensor]:
    return sample.plan(
        floats(128, VOCAB), floats(128), ints(128), floats(128), floats(128), longs(128), longs(128)
    )


def experts(rows: int, *, transposed: bool = False, bias: bool = False) -> Plan[Tensor]:
    weight = meta(128, 2048, 1536) if transposed else meta(128, 1536, 2048)
    return expert_linear.plan(
        meta(rows, 2048), weight, meta(128, 1536) if bias else None, longs(rows), transposed
    )


# in the ordinary test run, for every target
BUILDS: dict[str, Callable[[], Plan[Any]]] = {
    "write_kv": lambda: write_kv.plan(meta(64, 8, 128), meta(64, 8, 128), *caches(64)),
    "rope_write": lambda: rope(interleaved=False, normed=True),
    "rope_write interleaved": lambda: rope(interleaved=True, normed=False),
    "attention decode": lambda: attention(64, 64, 32, 8, 128),
    "attention prefill": lambda: attention(4096, 4, 32, 8, 128),
    "attention decode window sinks softcap": lambda: attention(
        64, 64, 64, 8, 64, window=128, sinks=True, softcap=50.0
    ),
    "attention drafts chunk alibi": lambda: attention(
        128, 32, 12, 12, 80, 64, chunk=8192, alibi=True
    ),
    "sample": sampler,
    "process_logits": logits_tables,
    "rms_norm": lambda: norm.plan(meta(64, 4096), meta(4096), 1e-6, 0.0),
    "add_rms_norm": lambda: norm.add_plan(meta(64, 4096), meta(64, 4096), meta(4096), 1e-6, 1.0),
    "act_mul silu": lambda: act_mul.plan(meta(64, 24576), "silu"),
    "act_mul gelu": lambda: act_mul.plan(meta(64, 24576), "gelu"),
    "act_mul gelu_tanh": lambda: act_mul.plan(meta(64, 24576), "gelu_tanh"),
    "expert_linear few": lambda: experts(64),
    "expert_linear many": lambda: experts(32768, transposed=True, bias=True),
}

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1024},
    "chunk": {"chunk": 8192},
    "softcap": {"softcap": 50.0},
    "sinks window": {"sinks": True, "window": 128},
    "alibi": {"alibi": True},
    "all": {"window": 64, "chunk": 128, "softcap": 5.0, "sinks": True, "alibi": True},
}
SHAPES = {"decode": (64, 64), "drafts": (256, 64), "prefill": (4096, 4)}


def sweep() -> Iterator[tuple[str, Callable[[], Plan[Any]]]]:
    """Attention, at length: every flag at one head size, every head size without flags."""

    def build(tokens: int, rows: int, dim: int, **features: Any) -> Callable[[], Plan[Any]]:
        return lambda: attention(tokens, rows, 16, 4, dim, **features)

    for shape, (tokens, rows) in SHAPES.items():
        for flags, features in FLAGS.items():
            yield f"{shape} {flags}", build(tokens, rows, 128, **features)
        for dim in (64, 80, 96, 112, 192, 256):
            yield f"{shape} {dim}", build(tokens, rows, dim)
        for dim in (64, 128, 256):
            yield f"{shape} {dim} float32", build(tokens, rows, dim, dtype=torch.float32)
        yield f"{shape} undivided", build(tokens, rows, 128, max_blocks=8)


def named_launches(plan: Plan[Any]) -> Iterator[tuple[str, Launch]]:
    for launch in plan.launches:
        yield launch.kernel.__name__, launch
