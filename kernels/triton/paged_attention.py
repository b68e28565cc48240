"""`paged_attention` in Triton: prefill, decode, and both in one step.

The grid, the scratch memory and the launch options depend only on shapes, and nothing is read back
to the host, so the op can run in a CUDA graph. How a long context is split is decided on the device
(attention_plan.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import block_tokens, caches_fit
from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import Prompts, fits_flash
from llmc.kernels.triton import chosen_attention, dependent_launch, prompt_attention
from llmc.kernels.triton.attention_kernel import attention_kernel
from llmc.kernels.triton.attention_rope import Rope, rope_args, rope_constants
from llmc.kernels.triton.attention_tiles import fits_descriptors, specializes, tiles
from llmc.kernels.triton.cached import as_bytes, format_constants, scales_for
from llmc.kernels.triton.configs import attention_config, rows_capacity
from llmc.kernels.triton.counters import counters
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    supports_tensors,
    token_stride,
)
from llmc.kernels.triton.fp8 import converts
from llmc.kernels.triton.launch import Launch, Plan, cdiv, multiprocessors, power_of_2
from llmc.kernels.triton.write_kv import cache_strides

MAX_HEAD_DIM = 512
MAX_REQUESTS = 16384


def plan(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    v_dim: int = 0,
    distance_bias: Tensor | None = None,
    rope: Rope | None = None,
) -> Plan[Tensor]:
    """`rope`: normalize and rotate the queries, and write this step's keys and values first."""
    tokens, heads, dim = query.shape
    kv_heads, block_size, shared = key_cache.shape[1], block_tokens(key_cache), v_dim > 0
    if shared:  # a key's channels are those of the value, then the others
        value_cache, v_scale, dim = key_cache, k_scale, dim - v_dim
    else:
        v_dim = value_cache.shape[3]
    rows, group = context_len.shape[0], heads // kv_heads
    dim_pad, v_dim_pad = power_of_2(dim, 16), power_of_2(v_dim, 16)
    config = attention_config(
        group * cdiv(tokens, max(rows, 1)), max(dim_pad, v_dim_pad), query.element_size(),
        key_cache.element_size(), distance_bias is not None,
    )  # fmt: skip
    if key_cache.dtype == torch.int8:  # the scales of keys and values take registers too
        block_m, block_n = min(config.block_m, 32), min(config.block_n, 32)
        config = replace(config, block_m=block_m, block_n=block_n)
    block_m = config.block_m
    group_tile = min(group, block_m)
    group_tiles = cdiv(group, group_tile)
    head_tiles = kv_heads * group_tiles
    block_q = block_m // group_tile
    # upper bound on items: whole tiles, plus one partial tile per request and for the tail
    items = min(tokens, tokens // block_q + rows + 1)
    longest = block_table.shape[1] * block_size
    target = max(1, cdiv(config.waves * multiprocessors(query.device), head_tiles))
    split = longest > config.min_tiles * config.block_n and target > 1

    descriptors = (
        config.descriptors
        and window == chunk == 0  # then every tile of keys starts at a multiple of its size
        and rope is None  # writes of the same kernel would need another fence before such reads
        and not shared
        and fits_descriptors(query, key_cache, value_cache, config.block_n)
    )
    specialize = (
        config.warp_specialize
        and descriptors
        and block_m >= 64  # smaller products are not made in tensor memory
        and distance_bias is None  # whose loads take more registers than the warps are given
        and specializes(query.device)
    )
    pdl = dependent_launch.applies_to(query.device)
    out = query.new_empty(tokens, heads, v_dim)
    parts = (2 * target, head_tiles, block_m)
    scratch = {
        "part_acc": query.new_empty(*parts, v_dim_pad, dtype=torch.float32) if split else None,
        "part_m": query.new_empty(parts, dtype=torch.float32) if split else None,
        "part_l": query.new_empty(parts, dtype=torch.float32) if split else None,
        "counters": counters(query.device, 2 * target * head_tiles) if split else None,
    }
    launch = Launch(
        kernel=attention_kernel,
        grid=(items + (target if split else 0), head_tiles),
        args={
            "query": query, "key_cache": as_bytes(key_cache), "value_cache": as_bytes(value_cache),
            **cache_strides(key_cache, value_cache),
            **(tiles(key_cache, value_cache, config.block_n) if descriptors else {}),
            "query_start": query_start, "context_len": context_len, "block_table": block_table,
            "sinks": sinks, "slopes": slopes, "distance_bias": distance_bias,
            "k_scale": scales_for(key_cache, k_scale),
            "v_scale": scales_for(value_cache, v_scale), "out": out, **scratch,
            "query_token": query.stride(0), "query_head": query.stride(1),
            "sinks_token": token_stride(sinks),
            "bias_token": 0 if distance_bias is None else distance_bias.stride(0),
            "bias_head": 0 if distance_bias is None else distance_bias.stride(1),
            "out_token": out.stride(0), "out_head": out.stride(1),
            "table_row": block_table.stride(0),
            **rope_args(rope), "scale": scale, "softcap": softcap,
            "num_rows": rows, "num_tokens": tokens, "target": target,
        },
        constants={
            "GROUP": group, "GROUP_TILE": group_tile, "GROUP_TILES": group_tiles,
            "BLOCK_SIZE": block_size,
            "DIM": dim, "DIM_PAD": dim_pad, "V_DIM": v_dim, "V_DIM_PAD": v_dim_pad,
            "BLOCK_M": block_m, "BLOCK_N": config.block_n,
            "ROWS": rows_capacity(rows), "MIN_TILES": config.min_tiles,
            "WINDOW": window, "CHUNK": chunk,
            "SOFTCAP": softcap > 0, "SINKS": sinks is not None, "ALIBI": slopes is not None,
            "DISTANCES": 0 if distance_bias is None else distance_bias.shape[2],
            "SHARED": shared, "SPLIT": split,
            "PRECISION": dot_precision(query.dtype),
            "UPCAST": needs_upcast(query.dtype), "NATIVE": converts(query.device),
            **format_constants(key_cache, k_scale, v_scale),
            "COMBINE_ROWS": min(config.combine_rows, power_of_2(block_q * group_tile)),
            "COMBINE_SPLITS": config.combine_splits,
            **rope_constants(rope), "PDL": pdl, "DESCRIPTORS": descriptors,
            "SPECIALIZE": specialize,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
        max_registers=None if torch.version.hip else config.max_registers or None,
    )  # fmt: skip
    return Plan(out=out, launches=(launch,))


def attend(**arguments: Any) -> Tensor:
    """`paged_attention` with our kernel; the arguments are those of `plan`."""
    return plan(**arguments).run()


def run(*args: Any) -> Tensor:
    arguments = paged_attention.bind(args)
    if arguments["chosen"] is not None:
        unused = ("window", "chunk", "slopes", "prompts", "v_dim", "distance_bias")
        taken = {name: value for name, value in arguments.items() if name not in unused}
        return chosen_attention.plan(**taken).run()
    del arguments["chosen"], arguments["sparse_block_size"]
    hint = arguments.pop("prompts")
    query: Tensor = arguments["query"]
    if hint is not None and prompt_attention.has_flash(query.device) and fits_flash(**arguments):
        prompts = Prompts.read(hint)
        if prompts.lengths:
            return prompt_attention.attend(attend, arguments, prompts)
    return attend(**arguments)


def supports(
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    chosen: Tensor | None,
    v_dim: int,
    **others: Any,
) -> bool:
    sinks, bias = others["sinks"], others["distance_bias"]
    plain = others["window"] == others["chunk"] == 0 and others["slopes"] is bias is None
    # the number of requests is symbolic while a graph is lowered: checked only if it is known
    rows = context_len.shape[0]
    return (
        supports_tensors(query, sinks, bias)
        and caches_fit(query, key_cache, value_cache, k_scale, v_scale)
        and max(query.shape[2] - v_dim, v_dim, value_cache.shape[3]) <= MAX_HEAD_DIM
        and v_dim < query.shape[2]
        and (chosen is None or (plain and chosen.stride(-1) == 1 and not v_dim))
        and (chosen is None or key_cache.dtype != torch.int8)
        and (not isinstance(rows, int) or rows <= MAX_REQUESTS)
    )


define(paged_attention, run=run, supports=supports)
