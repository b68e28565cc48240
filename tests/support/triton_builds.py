"""The launches that are compiled ahead of time: each op at realistic shapes.

Plans are made from meta tensors, which need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, cache_rows
from llmc.kernels.quantized_linear import Format, Quantization, Scale, quantization_of
from llmc.kernels.triton import (
    act_mul,
    add_lora,
    causal_conv,
    choose_blocks,
    choose_experts,
    choose_keys,
    chosen_attention,
    conv_recurrence,
    decayed_softmax,
    delta_rule,
    dequantize,
    encoder_attention,
    expert_linear,
    fused_linear,
    gated_rms_norm,
    gather_pages,
    latent_attention,
    linear_recurrence,
    norm,
    paged_attention,
    pool_windows,
    process_logits,
    quantized_embedding,
    quantized_expert_linear,
    quantized_linear,
    rope_attention,
    rope_latent_attention,
    rope_write,
    rope_write_latent,
    route,
    sample,
    sample_rows,
    scaled_expert_linear,
    scaled_linear,
    selective_scan,
    step_rows,
    token_logprobs,
    write_kv,
)
from llmc.kernels.triton.launch import Launch, Plan

BF16 = torch.bfloat16
VOCAB = 151936
SILU: expert_linear.Gate = ("silu", None, 0.0, False)
CLAMPED: expert_linear.Gate = ("quick_gelu", 7.0, 1.0, True)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def floats(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def blocks(kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    return meta(64, kv_heads, cache_rows(block_size, dim, dtype), dim, dtype=dtype)


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
    token_sinks: bool = False,
    alibi: bool = False,
    max_blocks: int = 2048,
    block_size: int = 16,
    cache: torch.dtype | None = None,
    shared: bool = False,
    distances: int = 0,
) -> Plan[Tensor]:
    return paged_attention.plan(
        meta(tokens, heads, dim, dtype=dtype),
        blocks(kv_heads, block_size, dim, cache or dtype),
        blocks(kv_heads, block_size, 0 if shared else v_dim or dim, cache or dtype),
        ints(rows + 1),
        ints(rows),
        ints(rows, max_blocks),
        dim**-0.5,
        window,
        chunk,
        softcap,
        meta(*[tokens] * token_sinks, heads, dtype=dtype) if sinks or token_sinks else None,
        floats(heads) if alibi else None,
        floats(1) if cache else None,
        floats(kv_heads) if cache and not shared else None,
        v_dim * shared,
        meta(tokens, heads, distances, dtype=dtype) if distances else None,
    )


def copied(tokens: int, rows: int, dim: int, *, specialize: bool, **features: Any) -> Plan[Tensor]:
    """Attention with the options that are off until measured: tiles are copied as a whole, and
    with `specialize` by a warp of its own."""
    choose = paged_attention.attention_config
    options = {"descriptors": True, "warp_specialize": specialize}
    with mock.patch.object(
        paged_attention, "attention_config", lambda *given: replace(choose(*given), **options)
    ):
        plan = attention(tokens, rows, 32, 8, dim, block_size=64, **features)
    assert plan.launches[0].constants["DESCRIPTORS"]
    return plan


def latent(tokens: int, rows: int, *, cache: torch.dtype | None = None) -> Plan[Tensor]:
    """A quarter of a large model's heads over a latent of 512 channels plus 64 positional ones."""
    return attention(tokens, rows, 32, 1, 576, 512, cache=cache, shared=True)


def head_products(*, onto_latents: bool) -> Plan[Tensor]:
    """The weight that queries meet, or latents, for two tokens of 32 such heads."""
    weight = meta(32, 256, 512)
    if onto_latents:
        return latent_attention.plan_product(meta(2, 32, 192), weight[:, :128], meta(2, 32, 576))
    latent, out = meta(2, 32, 512), meta(2, 32, 128)
    return latent_attention.plan_product(latent, weight[:, 128:].transpose(1, 2), out)


def latent_query(tokens: int, *, interleaved: bool, cache: torch.dtype = BF16) -> Plan[Tensor]:
    """32 heads of 128 + 64 channels; the latent of 512 and the shared part are one projection."""
    latent, shared, _ = meta(tokens, 2112).split([512, 64, 1536], dim=-1)
    return rope_latent_attention.plan_query(
        query=meta(tokens, 32, 192), latent=latent, shared=shared, latent_norm=meta(512), eps=1e-6,
        norm_offset=0.0, cos_table=floats(4096, 64), sin_table=floats(4096, 64),
        positions=longs(tokens), interleaved=interleaved, weight=meta(32 * 256, 512),
        key_cache=blocks(1, 16, 576, cache), slot_mapping=longs(tokens), k_scale=None,
    )  # fmt: skip


def chosen(
    group: int, *, cache: torch.dtype = BF16, sinks: Tensor | None = None, sparse_block: int = 1
) -> Plan[Tensor]:
    """Latent attention's sizes: 192 channels per key, 128 per value."""
    groups = 1 if sparse_block == 1 else 64 // group
    return chosen_attention.plan(
        meta(64, 64, 192), meta(64, 64 // group, 16, 192, dtype=cache),
        meta(64, 64 // group, 16, 128, dtype=cache), ints(65), ints(64), ints(64, 2048),
        ints(64, groups, 2048 // sparse_block), sparse_block, 192**-0.5, 0.0, sinks,
    )  # fmt: skip


def entries() -> Plan[Tensor]:
    """Tokens of a window and entries of four tokens, key and value in one, in blocks of 20 rows."""
    cache = meta(64, 1, 20, 512)
    return chosen_attention.plan(
        meta(64, 64, 512), cache, cache, ints(65), ints(64), ints(64, 2048),
        ints(64, 1, 128 + 512), 1, 512**-0.5, 0.0, meta(64),
    )  # fmt: skip


def caches(tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    return blocks(8, 16, 128, dtype), blocks(8, 16, 128, dtype), longs(tokens)


def rope(
    *, interleaved: bool, normed: bool, cache: torch.dtype = BF16, norm_last: bool = False,
    together: bool = False,
) -> Plan[Tensor]:  # fmt: skip
    widths = (32 * 128, 8 * 128) if together else (128, 128)
    weights = [meta(width) if normed else None for width in widths]
    key = meta(64, 8, 128)
    tables = floats(4096, 128), floats(4096, 128), longs(64)
    return rope_write.plan(
        meta(64, 32, 128),
        key,
        key,
        *weights,
        1e-6,
        0.0,
        *tables,
        interleaved,
        *caches(64, cache),
        norm_last=norm_last,
    )


def latent_rope(tokens: int, *, interleaved: bool, cache: torch.dtype = BF16) -> Plan[Tensor]:
    """128 heads of 128 + 64 channels; the latent of 512 and the shared part are one projection."""
    latent, shared, _ = meta(tokens, 2112).split([512, 64, 1536], dim=-1)
    return rope_write_latent.plan(
        meta(tokens, 128, 192), latent, shared, meta(512), 1e-6, 0.0, floats(4096, 64),
        floats(4096, 64), longs(tokens), interleaved, blocks(1, 16, 576, cache), longs(tokens),
    )  # fmt: skip


def rope_decode(
    heads: int, dim: int, *, window: int = 0, cache: torch.dtype = BF16, normed: bool = True,
    norm_last: bool = False, width: int | None = None, together: bool = False,
) -> Plan[Tensor]:  # fmt: skip
    """A decode step of 64 requests; keys and values are views of one projection."""
    q, k, v = meta(64, (heads + 16) * dim).split([heads * dim, 8 * dim, 8 * dim], dim=-1)
    widths = (heads * dim, 8 * dim) if together else (dim, dim)
    weights = [meta(width) if normed else None for width in widths]
    return rope_attention.plan(
        q.unflatten(-1, (heads, dim)), k.unflatten(-1, (8, dim)), v.unflatten(-1, (8, dim)),
        *weights, 1e-6, 0.0, *(floats(4096, dim if width is None else width) for _ in "cs"),
        longs(64), False,
        *(blocks(8, 16, dim, cache) for _ in "kv"), longs(64),
        ints(65), ints(64), ints(64, 2048), dim**-0.5, window, 0, 0.0,
        meta(heads) if window else None, None, norm_last=norm_last,
    )  # fmt: skip


def logits_tables(samples: int = 128) -> tuple[Tensor, ...]:
    rows = 256
    return (
        meta(samples, VOCAB),
        longs(samples),
        ints(samples),
        ints(rows, 40960),
        ints(rows),
        floats(rows),
        floats(rows),
        floats(rows),
        ints(rows),
        ints(rows, 300),
        floats(rows, 300),
        ints(rows, 300),
        ints(rows),
        ints(rows, VOCAB // 32),
    )


def whole_sampler(samples: int = 128) -> Plan[Tensor]:
    parameters = floats(256), ints(256), floats(256), floats(256), longs(256)
    return sample_rows.plan(*logits_tables(samples), ints(256, 64 * 16), 16, *parameters, 0)


def sampler() -> Plan[Tensor]:
    return sample.plan(
        floats(128, VOCAB), floats(128), ints(128), floats(128), floats(128), longs(128), longs(128)
    )


def experts(
    rows: int,
    count: int = 128,
    *,
    choices: int = 1,
    transposed: bool = False,
    bias: bool = False,
    gate: tuple[Any, ...] = (),
    sums: expert_linear.Sum | None = None,
) -> Plan[Tensor]:
    weight = meta(count, 2048, 1536) if transposed else meta(count, 1536, 2048)
    return expert_linear.plan(
        meta(rows // choices, 2048),
        weight,
        meta(count, 1536) if bias else None,
        longs(rows),
        transposed,
        None,
        None,
        *gate,
        sums=sums,
    )


def summed(tokens: int) -> expert_linear.Sum:
    """Of eight choices of each token, and the residual."""
    return expert_linear.Sum(share=meta(tokens, 8), dtype=BF16, residual=meta(tokens, 1536))


def lora(rows: int, rank: int, parts: int = 1) -> Plan[None]:
    """Eight slots on a linear of 4096 inputs."""
    return add_lora.plan(
        meta(1, rows, 6144),
        meta(1, rows, 4096),
        meta(8, parts, rank, 4096),
        meta(8, rank, 6144),
        ints(parts + 1),
        ints(rows),
    )


def lora_experts(tokens: int, rank: int) -> Plan[None]:
    """Four slots on 128 experts, eight chosen per token."""
    return add_lora.plan(
        meta(8 * tokens, 1536),
        meta(8 * tokens, 2048),
        meta(4, 128, rank, 2048),
        meta(4, 128, rank, 1536),
        ints(2),
        ints(tokens),
        longs(8 * tokens),
    )


def step_inputs() -> Plan[None]:
    tokens, rows = 8192, 64
    history, table = ints(257, 40961), ints(257, 2 * 2560)
    return step_rows.plan_prepare(
        ints(rows, 8),
        history,
        table,
        ints(257),
        16,
        *(longs(tokens) for _ in range(2)),
        longs(2, tokens),
        ints(rows + 1),
        ints(rows),
        ints(2, rows, 2560),
        *(longs(rows) for _ in range(3)),
        ints(rows),
    )


Q4_K = Quantization(format="int4", group=32, scale="superblock", minimum=True)
Q5_K = Quantization(format="int5", group=32, scale="superblock", minimum=True)
Q6_K = Quantization(format="int6", group=16, scale="superblock")
IQ4_XS = Quantization(format="iq4", group=32, scale="superblock")
IQ2_XS = Quantization(format="iq2", group=16, scale="superblock")
NVFP4 = Quantization(format="nvfp4", group=16)
FUSED_FORMATS = {
    "int4": Quantization(format="int4", group=128, scale="float16", zero=True),
    "int8": Quantization(format="int8"),
    "fp8": Quantization(format="fp8", group=128),
    "mxfp4": Quantization(format="mxfp4", group=32, scale="exponent"),
    "Q4_K": Q4_K,
    "Q6_K": Q6_K,
}


def low_bit(
    rows: int, format: Format, *, group: int = 0, stored: Quantization | None = None
) -> Plan[Tensor]:
    """`group`: as in checkpoints, with float32 scales and, for int4, zero points."""
    to = stored or quantization_of(format, 4096, 14336)
    if group:
        to = Quantization(format=format, group=group, scale="float32", zero=format == "int4")
    assert to is not None
    weight = meta(*to.shape("weight", 4096, 14336), dtype=to.dtype)
    scale = meta(*to.shape("scale", 4096, 14336), dtype=to.scale_dtype)
    zeros = meta(*scale.shape, dtype=torch.uint8) if to.zero else None
    return quantized_linear.plan(meta(rows, 14336), weight, scale, zeros, meta(4096))


def low_bit_layer(
    rows: int, to: Quantization, act: str | None = None, *, centered: bool = False
) -> Plan[Tensor]:
    """With a norm if it is gated, otherwise with a residual, as in a decoder layer."""
    size = (4096, 14336) if act is None else (28672, 4096)
    parts = {part: meta(*to.shape(part, *size), dtype=dtype) for part, dtype in to.dtypes.items()}
    normed, out = act is not None, size[0] // (1 if act is None else 2)
    return quantized_linear.plan(
        meta(rows, size[1]), parts["weight"], parts["scale"], parts.get("zero"), None,
        parts.get("minimum"), meta(size[1]) if normed else None, 1e-6 if normed else None, 0.0,
        act, None if normed else meta(rows, out), True, centered,
        meta(size[1]) if centered else None,
    )  # fmt: skip


def sandwiched_low_bit(rows: int, to: Quantization) -> Plan[Any]:
    """A gated layer with another norm, and a sum, before its norm."""
    sums = (meta(rows, 4096), meta(rows, 4096), meta(4096), 1e-6, 1.0)
    return norm.with_sum(low_bit_layer(rows, to, "gelu_tanh"), *sums)


def dequantized(
    format: Format, group: int, scale: Scale, *, zero: bool = False, minimum: bool = False
) -> Plan[Tensor]:
    to = Quantization(format=format, group=group, scale=scale, zero=zero, minimum=minimum)
    parts = {p: meta(*to.shape(p, 4096, 14336), dtype=d) for p, d in to.dtypes.items()}
    return dequantize.plan(
        parts["weight"], parts["scale"], parts.get("zero"), None, meta(4096, 14336)
    )


def codes_product(group: int = 0, *, rows: int = 4096) -> Plan[Tensor]:
    """Float8 by float8, with scales as in checkpoints."""
    groups = 14336 // group if group else 1
    x, weight = (meta(n, 14336, dtype=torch.float8_e4m3fn) for n in (rows, 4096))
    return scaled_linear.plan_product(
        x, floats(rows, groups), weight, floats(256, groups, 16), meta(4096), meta(rows, 4096)
    )


def low_bit_experts(
    rows: int, format: Format, *, choices: int = 1, minimum: bool = False,
    stored: Quantization | None = None, gate: tuple[Any, ...] = (),
    sums: expert_linear.Sum | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """In groups of 32, as in checkpoints and GGUF files."""
    scale: Scale = "exponent" if format == "mxfp4" else "float16"
    to = stored or Quantization(format=format, group=32, scale=scale, minimum=minimum)
    parts = {p: meta(*to.shape(p, 128, 1536, 2048), dtype=d) for p, d in to.dtypes.items()}
    return quantized_expert_linear.plan(
        meta(rows // choices, 2048),
        parts["weight"],
        parts["scale"],
        None,
        meta(128, 1536),
        longs(rows),
        parts.get("minimum"),
        24,
        None,
        None,
        *gate,
        sums=sums,
    )


def scaled_experts(
    rows: int, group: int = 0, *, choices: int = 1,
    gate: expert_linear.Gate = expert_linear.UNGATED, sums: expert_linear.Sum | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """Float8 by float8, with scales as in checkpoints; without the launch that rounds x."""
    to = Quantization(format="fp8", group=group)
    plan = scaled_expert_linear.plan(
        meta(rows // choices, 2048),
        meta(*to.shape("weight", 128, 1536, 2048), dtype=to.dtype),
        floats(*to.shape("scale", 128, 1536, 2048)),
        meta(128, 1536),
        longs(rows),
        gate=gate,
        sums=sums,
    )
    return Plan(out=plan.out, launches=plan.launches[1:])


def embedding(
    tokens: int, format: Format, *, minimum: bool = False, stored: Quantization | None = None
) -> Plan[Tensor]:
    """In groups of 32, as in GGUF files."""
    to = stored or Quantization(format=format, group=32, scale="float32", minimum=minimum)
    parts = {p: meta(*to.shape(p, VOCAB, 4096), dtype=d) for p, d in to.dtypes.items()}
    return quantized_embedding.plan(
        longs(tokens), parts["weight"], parts["scale"], None, parts.get("minimum"), BF16
    )


def few_rows(
    rows: int, channels: int, depth: int, act: str | None = None, *, gated: bool = True
) -> Plan[Tensor]:
    """With a norm if it has an activation, otherwise with a residual, as in a decoder layer."""
    normed = act is not None
    return fused_linear.plan(
        meta(rows, depth), meta(channels, depth), None, meta(depth) if normed else None,
        1e-6 if normed else None, 0.0, act, None if normed else meta(rows, channels), gated=gated,
    )  # fmt: skip


def centered_rows(rows: int, channels: int, depth: int, act: str | None) -> Plan[Tensor]:
    """With a layer_norm and biases."""
    return fused_linear.plan(
        meta(rows, depth), meta(channels, depth), meta(channels), meta(depth), 1e-6, 0.0, act, None,
        gated=False, centered=True, norm_bias=meta(depth),
    )  # fmt: skip


def sandwiched_rows(rows: int, channels: int, depth: int, act: str | None) -> Plan[Any]:
    """With the norm and the sum before it, and if it has an activation, with another norm."""
    normed = act is not None
    return fused_linear.sum_plan(
        meta(rows, depth), meta(rows, depth), meta(depth), 1e-6, 1.0, meta(channels, depth), None,
        meta(depth) if normed else None, 1e-6 if normed else None, 1.0, act,
    )  # fmt: skip


def gated_rows(rows: int, depth: int, group: int, *, first: bool) -> Plan[Tensor]:
    """The linear after a recurrent layer: with a gated norm before it, and a residual."""
    x, gate = meta(rows, depth, dtype=torch.float32 if first else BF16), meta(rows, 3 * depth)
    return fused_linear.plan(
        x, meta(depth // 2, depth), None, meta(depth), 1e-6, 0.0, None, meta(rows, depth // 2),
        gate[:, :depth], "silu", first, group,
    )  # fmt: skip


def router(
    rows: int, experts: int, *, bias: bool = False, correction: Tensor | None = None
) -> Plan[Any]:
    return route.plan(
        meta(rows, 2048), meta(2048), 1e-6, 0.0, meta(experts, 2048),
        meta(experts) if bias else None, longs(rows), 8, True, BF16, correction,
        "softmax" if correction is None else "sigmoid",
    )  # fmt: skip


def wide_router(rows: int) -> Plan[Any]:
    """In float32 in a layer in bfloat16, with experts in groups."""
    return route.plan(
        meta(rows, 7168), meta(7168), 1e-6, 0.0, floats(256, 7168), None, longs(rows), 8, True,
        torch.float32, floats(256), "sigmoid", 8, 4, 1e-20, 2.5, 1,
    )  # fmt: skip


def gated_router(rows: int) -> Plan[Any]:
    """Its last output is the gate of a shared expert."""
    return route.plan(
        meta(rows, 2048), meta(2048), 1e-6, 1.0, meta(513, 2048), None, longs(rows), 10, True,
        BF16, None, "softmax", 1, 1, 0.0, 1.0, 1, True,
    )  # fmt: skip


def slots(requests: int, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    state = meta(257, *shape, dtype=dtype)
    return state, ints(requests + 1), ints(requests), longs(requests)


def delta(tokens: int, requests: int, *, by_channel: bool = False) -> Plan[Tensor]:
    """Two heads share a key, and the op normalizes keys and computes decays."""
    query, key, value = meta(tokens, 8192).split([2048, 2048, 4096], dim=-1)
    decays = 128 if by_channel else 1
    return delta_rule.plan(
        query.unflatten(-1, (16, 128)), key.unflatten(-1, (16, 128)),
        value.unflatten(-1, (32, 128)), meta(tokens, 32, decays), meta(tokens, 32), 128**-0.5,
        1e-6, floats(32), meta(32, decays), 1.0, *slots(requests, 32, 128, 128),
    )  # fmt: skip


def units(tokens: int) -> Plan[None]:
    """Three heads, so that not all sizes divide by 16."""
    query, key = meta(tokens, 1152).split([384, 768], dim=-1)
    _, launches = delta_rule._units(
        query.unflatten(-1, (3, 128)), key[:, :384].unflatten(-1, (3, 128)), 128**-0.5, 1e-6
    )
    return Plan(out=None, launches=launches)


def scan(requests: int, heads: int, width: int, size: int) -> Plan[Tensor]:
    """A state per channel also has a gate; one per head is normalized after it, in float32."""
    by_state = width == 1
    into, read = meta(requests, 2 * size).split(size, dim=-1)
    x, gate = meta(2, requests, heads, width).unbind()
    return selective_scan.plan(
        x, meta(requests, heads), floats(heads, size if by_state else 1), into[:, None],
        read[:, None], meta(heads), gate if by_state else None, meta(heads), True, 0.0, math.inf,
        BF16 if by_state else torch.float32, *slots(requests, heads, width, size),
    )  # fmt: skip


def linear_attention(requests: int, heads: int, dim: int) -> Plan[Tensor]:
    """The queries, keys and values of each head next to each other, as from one projection."""
    q, k, v = meta(requests, heads, 3 * dim).split(dim, dim=-1)
    return selective_scan.plan(
        v, floats(requests, heads), floats(heads, 1), k, q, None, None, None, False, -math.inf,
        math.inf, BF16, *slots(requests, heads, dim, dim),
    )  # fmt: skip


def conv(tokens: int, requests: int) -> Plan[Tensor]:
    step = slots(requests, 8192, 3, dtype=BF16)
    return causal_conv.plan(
        meta(tokens, 12288)[:, :8192], meta(8192, 4), meta(8192), "silu", None, None, *step
    )


def gated_conv(tokens: int, requests: int) -> Plan[Tensor]:
    """Inputs and both gates as from one projection."""
    x, before, after = meta(tokens, 3 * 2048).chunk(3, dim=1)
    step = slots(requests, 2048, 2, dtype=BF16)
    return causal_conv.plan(x, meta(2048, 3), None, None, before, after, *step)


def convolution(requests: int, channels: int) -> tuple[Any, ...]:
    """x, weight, bias, act and state, as `conv_delta_rule` and `conv_scan` take them."""
    state, *_ = slots(requests, channels, 3, dtype=BF16)
    return meta(requests, 2 * channels)[:, :channels], meta(channels, 4), None, "silu", state


def conv_delta(requests: int, *, by_channel: bool = False) -> Plan[Tensor]:
    decays = 128 if by_channel else 1
    return conv_recurrence.plan_delta_rule(
        *convolution(requests, 8192), 16, meta(requests, 32, decays), meta(requests, 32),
        128**-0.5, 1e-6, floats(32), meta(32, decays), 1.0, *slots(requests, 32, 128, 128),
    )  # fmt: skip


def conv_scan(requests: int) -> Plan[Tensor]:
    """Normalized after it, in float32."""
    return conv_recurrence.plan_scan(
        *convolution(requests, 80 * 64 + 2 * 128), 1, meta(requests, 80), floats(80, 1), meta(80),
        None, meta(80), True, 0.0, math.inf, torch.float32, *slots(requests, 80, 64, 128),
    )  # fmt: skip


def gated_norm(tokens: int, heads: int, width: int) -> Plan[Tensor]:
    """Of heads, before the gate."""
    gate = meta(1, tokens, 3 * heads * width)[..., : heads * width].unflatten(-1, (heads, width))
    x = meta(1, tokens, heads, width)
    return gated_rms_norm.plan(x, gate, meta(width), 1e-6, 0.0, "silu", False, width, BF16)


def grouped_norm(tokens: int, width: int) -> Plan[Tensor]:
    """Of eight groups of channels, after the gate."""
    x, gate = floats(1, tokens, width), meta(1, tokens, 3 * width)[..., :width]
    return gated_rms_norm.plan(x, gate, meta(width), 1e-6, 0.0, "silu", True, width // 8, BF16)


def recurrence(tokens: int, requests: int) -> Plan[Tensor]:
    return linear_recurrence.plan(
        floats(tokens, 4096), floats(tokens, 4096), *slots(requests, 4096)
    )


def pooling(tokens: int, requests: int, series: int, width: int) -> Plan[Tensor]:
    x = meta(tokens, series * 512)
    state = slots(requests, 2 * series - 1, 3, 512)
    return pool_windows.plan(x, x, floats(width, series * 512), series, *state)


def mixing(requests: int) -> Plan[Tensor]:
    x, fade = meta(requests, 4096), floats(4096)
    return decayed_softmax.plan(x, x, fade, fade, *slots(requests, 3, 4096))


def encoder(tokens: int, texts: int, window: int = 0) -> Plan[Tensor]:
    queries, keys, values = (meta(tokens, 12, 64) for _ in range(3))
    return encoder_attention.plan(queries, keys, values, ints(texts + 1), 0.125, window)


# in the ordinary test run, for every target
BUILDS: dict[str, Callable[[], Plan[Any]]] = {
    "write_kv": lambda: write_kv.plan(meta(64, 8, 128), meta(64, 8, 128), *caches(64)),
    "rope_write": lambda: rope(interleaved=False, normed=True),
    "rope_write heads normed together": lambda: rope(interleaved=False, normed=True, together=True),
    "rope_write norm last": lambda: rope(interleaved=False, normed=True, norm_last=True),
    "rope_attention unrotated": lambda: rope_decode(32, 128, normed=False, width=0),
    "rope_attention unrotated, normed": lambda: rope_decode(32, 128, width=0),
    "rope_attention heads normed together": lambda: rope_decode(48, 128, together=True),
    "rope_attention norm last": lambda: rope_decode(32, 128, norm_last=True),
    "rope_write interleaved": lambda: rope(interleaved=True, normed=False),
    "attention decode": lambda: attention(64, 64, 32, 8, 128),
    "rope_attention": lambda: rope_decode(32, 128),
    "rope_attention window sinks": lambda: rope_decode(64, 64, window=128, normed=False),
    "rope_attention int8": lambda: rope_decode(32, 128, cache=torch.int8),
    "rope_attention fp8_e4m3": lambda: rope_decode(32, 128, cache=FP8[0]),
    "attention prefill": lambda: attention(4096, 4, 32, 8, 128),
    "attention prefill copied": lambda: copied(4096, 4, 128, specialize=False),
    "attention prefill specialized": lambda: copied(4096, 4, 128, specialize=True),
    "attention prefill specialized 64": lambda: copied(4096, 4, 64, specialize=True),
    "attention prefill specialized 256": lambda: copied(4096, 4, 256, specialize=True),
    "attention prompts out of pages": lambda: gather_pages.plan(
        meta(64, 8, 16, 128), meta(64, 8, 16, 128), ints(5), ints(4, 2048), 8192, 4096
    ),
    "attention chosen": lambda: chosen(4),
    "attention chosen fp8_e4m3 sinks": lambda: chosen(64, cache=FP8[0], sinks=meta(64)),
    "attention chosen entries": entries,
    "attention chosen blocks": lambda: chosen(16, sparse_block=128),
    "choose_blocks": lambda: choose_blocks.plan_ranks(
        meta(64, 4, 128),
        meta(64, 1, 16, 128),
        ints(65),
        ints(64),
        ints(64, 2048),
        128,
        1,
        0,
        64,
    ),
    "choose_blocks of a token": lambda: choose_blocks.plan_ranks(
        meta(64, 2, 2),
        meta(64, 1, 16, 2),
        ints(65),
        ints(64),
        ints(64, 2048),
        1,
        0,
        0,
        64,
    ),
    "choose_keys": lambda: choose_keys.plan_ranks(
        meta(64, 64, 128),
        floats(64, 64),
        meta(64, 1, 16, 128),
        ints(65),
        ints(64),
        ints(64, 2048),
        0,
        64,
    ),
    "choose_keys of entries": lambda: choose_keys.plan_ranks(
        meta(64, 64, 128),
        floats(64, 64),
        meta(64, 1, 4, 128),
        ints(65),
        ints(64),
        ints(64, 2048),
        0,
        64,
        4,
    ),
    "write_kv fp8_e5m2": lambda: write_kv.plan(
        meta(64, 8, 128), meta(64, 8, 128), *caches(64, FP8[1]), floats(8), floats(1)
    ),
    "rope_write_latent": lambda: latent_rope(64, interleaved=False),
    "rope_write_latent interleaved": lambda: latent_rope(64, interleaved=True),
    "rope_write_latent fp8_e4m3": lambda: latent_rope(64, interleaved=True, cache=FP8[0]),
    "rope_write int8": lambda: rope(interleaved=False, normed=True, cache=torch.int8),
    "rope_write fp8_e4m3": lambda: rope(interleaved=False, normed=True, cache=FP8[0]),
    "latent_query": lambda: latent_query(2, interleaved=False),
    "latent_query interleaved": lambda: latent_query(2, interleaved=True),
    "latent_query fp8_e4m3": lambda: latent_query(2, interleaved=True, cache=FP8[0]),
    "head_product onto latents": lambda: head_products(onto_latents=True),
    "head_product of latents": lambda: head_products(onto_latents=False),
    "attention latent decode": lambda: latent(64, 64),
    "attention latent prefill": lambda: latent(4096, 4),
    "attention latent prompts expanded": lambda: attention(4096, 4, 32, 32, 192, 128),
    "attention latent decode fp8_e4m3": lambda: latent(64, 64, cache=FP8[0]),
    "attention decode int8": lambda: attention(64, 64, 32, 8, 128, cache=torch.int8),
    "attention prefill int8": lambda: attention(4096, 4, 32, 8, 128, cache=torch.int8),
    "attention decode fp8_e4m3": lambda: attention(64, 64, 32, 8, 128, cache=FP8[0]),
    "attention decode fp8_e5m2": lambda: attention(64, 64, 32, 8, 128, cache=FP8[1]),
    "attention prefill fp8_e4m3": lambda: attention(4096, 4, 32, 8, 128, cache=FP8[0]),
    "attention decode window sinks softcap": lambda: attention(
        64, 64, 64, 8, 64, window=128, sinks=True, softcap=50.0
    ),
    "attention drafts chunk alibi": lambda: attention(
        128, 32, 12, 12, 80, 64, chunk=8192, alibi=True
    ),
    "attention decode distances": lambda: attention(
        64, 64, 48, 8, 128, distances=1024, token_sinks=True
    ),
    "attention prefill distances": lambda: attention(
        4096, 4, 48, 8, 128, distances=1024, token_sinks=True
    ),
    "sample": sampler,
    "token_logprobs": lambda: token_logprobs.plan(floats(128, VOCAB), longs(128), 20),
    "process_logits": lambda: process_logits.plan(*logits_tables()),
    "sample_rows": whole_sampler,
    "gated_rms_norm": lambda: gated_norm(64, 32, 128),
    "gated_rms_norm of groups": lambda: grouped_norm(64, 8192),
    "rms_norm": lambda: norm.plan(meta(64, 4096), meta(4096), 1e-6, 0.0),
    "add_rms_norm": lambda: norm.add_plan(meta(64, 4096), meta(64, 4096), meta(4096), 1e-6, 1.0),
    "layer_norm": lambda: norm.layer_plan(meta(64, 4096), meta(4096), meta(4096), 1e-6),
    "add_layer_norm": lambda: norm.add_layer_plan(
        meta(64, 4096), meta(64, 4096), meta(4096), None, 1e-6
    ),
    "norm_add": lambda: norm.norm_add_plan(meta(64, 4096), meta(64, 4096), meta(4096), 1e-6, 0.0),
    "norm_add_norm": lambda: norm.norm_add_norm_plan(
        meta(64, 4096), meta(64, 4096), meta(4096), 1e-6, 1.0, meta(4096), 1e-6, 1.0
    ),
    "act_mul silu": lambda: act_mul.plan(meta(64, 24576), "silu"),
    "act_mul gelu": lambda: act_mul.plan(meta(64, 24576), "gelu"),
    "act_mul gelu_tanh": lambda: act_mul.plan(meta(64, 24576), "gelu_tanh"),
    "act_mul relu2": lambda: act_mul.plan(meta(64, 24576), "relu2"),
    "activate": lambda: act_mul.plan_ungated(meta(64, 12288), "relu2"),
    "act_mul clamped": lambda: act_mul.plan(meta(64, 24576), *CLAMPED),
    "write_segments": lambda: step_rows.plan_write(ints(1 << 24), ints(4096)),
    "prepare_step": step_inputs,
    "ban_words": lambda: step_rows.plan_ban(
        floats(128, VOCAB),
        longs(128),
        ints(128),
        ints(257, 40961),
        ints(257),
        ints(257, 64 * 16),
        16,
    ),
    "record_tokens": lambda: step_rows.plan_record(
        ints(257, 40961), longs(64), ints(64), longs(64)
    ),
    "expert_linear few": lambda: experts(64),
    "expert_linear unsorted": lambda: experts(1000),
    "expert_linear unsorted, few experts": lambda: experts(1000, 16),
    "expert_linear many": lambda: experts(32768, transposed=True, bias=True),
    "expert_linear of tokens": lambda: experts(32768, choices=8),
    "expert_linear gated few": lambda: experts(64, choices=8, gate=SILU),
    "expert_linear gated unsorted": lambda: experts(1000, 16, bias=True, gate=SILU),
    "expert_linear gated many": lambda: experts(32768, transposed=True, gate=SILU),
    "expert_linear clamped few": lambda: experts(64, transposed=True, bias=True, gate=CLAMPED),
    "sum_expert_linear row": lambda: experts(8, bias=True, sums=summed(1)),
    "sum_expert_linear few": lambda: experts(64, transposed=True, sums=summed(8)),
    "choose_experts": lambda: choose_experts.plan(meta(64, 128), longs(64), 8, True, BF16),
    "choose_experts of groups": lambda: choose_experts.plan(
        meta(64, 256), longs(64), 8, True, BF16, floats(256), "sigmoid", 8, 4, 1e-20, 2.5
    ),
    "choose_experts by roots": lambda: choose_experts.plan(
        meta(64, 256), longs(64), 6, True, BF16, floats(256), "sqrt_softplus", 1, 1, 1e-20, 1.5
    ),
    "route corrected": lambda: router(8, 256, correction=floats(256)),
    "route row": lambda: router(1, 128),
    "route few": lambda: router(8, 128),
    "route wide row": lambda: wide_router(1),
    "route wide few": lambda: wide_router(8),
    "route gated": lambda: gated_router(8),
    "route few of many experts": lambda: router(8, 512, bias=True),
    "sum_experts": lambda: choose_experts.plan_sum(meta(512, 2048), meta(64, 8), BF16),
    "add_lora few": lambda: lora(64, 16, parts=3),
    "add_lora many": lambda: lora(8192, 64),
    "add_lora experts": lambda: lora_experts(64, 16),
    "fused_linear row": lambda: few_rows(1, 4096, 14336),
    "fused_linear row gated": lambda: few_rows(1, 28672, 4096, "silu"),
    "fused_linear few": lambda: few_rows(8, 4096, 14336),
    "fused_linear few gated": lambda: few_rows(8, 28672, 4096, "silu"),
    "fused_linear row activated": lambda: few_rows(1, 14336, 4096, "relu2", gated=False),
    "fused_linear few activated": lambda: few_rows(8, 14336, 4096, "gelu", gated=False),
    "fused_linear row centered": lambda: centered_rows(1, 6144, 4096, None),
    "fused_linear few centered": lambda: centered_rows(4, 16384, 4096, "gelu"),
    "norm_add_linear row": lambda: sandwiched_rows(1, 6144, 4096, None),
    "norm_add_linear row gated": lambda: sandwiched_rows(1, 28672, 4096, "gelu_tanh"),
    "norm_add_linear few": lambda: sandwiched_rows(4, 6144, 4096, None),
    "norm_add_linear few gated": lambda: sandwiched_rows(4, 28672, 4096, "gelu_tanh"),
    "fused_linear row, norm of heads": lambda: gated_rows(1, 4096, 128, first=False),
    "fused_linear few, norm of heads": lambda: gated_rows(8, 4096, 128, first=False),
    "fused_linear row, norm of groups": lambda: gated_rows(1, 10240, 1280, first=True),
    "fused_linear few, norm of groups": lambda: gated_rows(8, 8192, 1024, first=True),
    "fused_linear few, gated norm": lambda: gated_rows(8, 5120, 5120, first=True),
    "quantized_linear int4 row": lambda: low_bit(1, "int4"),
    "quantized_linear int8 row": lambda: low_bit(1, "int8"),
    "quantized_linear fp8 row": lambda: low_bit(1, "fp8"),
    "quantized_linear fp8 row, groups": lambda: low_bit(1, "fp8", group=128),
    "quantized_linear int4 few": lambda: low_bit(8, "int4", group=128),
    "quantized_linear int4 many": lambda: low_bit(255, "int4"),
    "quantized_linear fp8 many": lambda: low_bit(255, "fp8"),
    "quantized_linear Q4_K row": lambda: low_bit(1, "int4", stored=Q4_K),
    "quantized_linear Q4_K few": lambda: low_bit(8, "int4", stored=Q4_K),
    **{
        f"fused_quantized_linear {name} {of} {kind}": partial(low_bit_layer, rows, to, act)
        for name, to in FUSED_FORMATS.items()
        for of, rows in (("row", 1), ("few", 8))
        for kind, act in (("gated", "silu"), ("added", None))
    },
    **{
        f"fused_quantized_linear {name} {of} centered": partial(
            low_bit_layer, rows, FUSED_FORMATS[name], "silu", centered=True
        )
        for name in ("int4", "Q4_K")
        for of, rows in (("row", 1), ("few", 4))
    },
    **{
        f"norm_add_quantized_linear {name} {of}": partial(
            sandwiched_low_bit, rows, FUSED_FORMATS[name]
        )
        for name in ("int4", "Q4_K")
        for of, rows in (("row", 1), ("few", 4))
    },
    "quantized_linear Q5_K row": lambda: low_bit(1, "int5", stored=Q5_K),
    "quantized_linear Q5_K many": lambda: low_bit(255, "int5", stored=Q5_K),
    "quantized_linear Q6_K row": lambda: low_bit(1, "int6", stored=Q6_K),
    "quantized_linear Q6_K few": lambda: low_bit(8, "int6", stored=Q6_K),
    "quantized_linear Q6_K many": lambda: low_bit(255, "int6", stored=Q6_K),
    "quantized_linear IQ4_XS row": lambda: low_bit(1, "iq4", stored=IQ4_XS),
    "quantized_linear IQ4_XS many": lambda: low_bit(255, "iq4", stored=IQ4_XS),
    "quantized_linear IQ4_XS dequantized": lambda: dequantized("iq4", 32, "superblock"),
    "quantized_expert_linear IQ4_XS few": lambda: low_bit_experts(64, "iq4", stored=IQ4_XS),
    "quantized_embedding IQ4_XS": lambda: embedding(64, "iq4", stored=IQ4_XS),
    "quantized_linear NVFP4 row": lambda: low_bit(1, "nvfp4", stored=NVFP4),
    "quantized_linear NVFP4 many": lambda: low_bit(255, "nvfp4", stored=NVFP4),
    "quantized_linear NVFP4 dequantized": lambda: dequantized("nvfp4", 16, "float32"),
    "quantized_expert_linear NVFP4 few": lambda: low_bit_experts(64, "nvfp4", stored=NVFP4),
    "quantized_linear IQ2_XS row": lambda: low_bit(1, "iq2", stored=IQ2_XS),
    "quantized_linear IQ2_XS many": lambda: low_bit(255, "iq2", stored=IQ2_XS),
    "quantized_linear IQ2_XS dequantized": lambda: dequantized("iq2", 16, "superblock"),
    "quantized_expert_linear IQ2_XS few": lambda: low_bit_experts(64, "iq2", stored=IQ2_XS),
    "quantized_linear Q5_K dequantized": lambda: dequantized(
        "int5", 32, "superblock", minimum=True
    ),
    "quantized_linear Q6_K dequantized": lambda: dequantized("int6", 16, "superblock"),
    "quantized_linear Q4_K dequantized": lambda: dequantized(
        "int4", 32, "superblock", minimum=True
    ),
    "quantized_expert_linear Q4_K few": lambda: low_bit_experts(64, "int4", stored=Q4_K),
    "quantized_expert_linear Q5_K few": lambda: low_bit_experts(64, "int5", stored=Q5_K),
    "quantized_expert_linear Q6_K many": lambda: low_bit_experts(32768, "int6", stored=Q6_K),
    "quantized_embedding Q5_K": lambda: embedding(64, "int5", stored=Q5_K),
    "quantized_embedding Q6_K": lambda: embedding(64, "int6", stored=Q6_K),
    "quantized_linear int4 dequantized": lambda: dequantized("int4", 128, "bfloat16", zero=True),
    "quantized_linear int8 dequantized": lambda: dequantized("int8", 0, "float32"),
    "quantized_linear fp8 dequantized": lambda: dequantized("fp8", 128, "float32"),
    "quantized_linear mxfp4 dequantized": lambda: dequantized("mxfp4", 32, "exponent"),
    "quantized_linear fp8 codes of rows": lambda: scaled_linear.plan_codes(
        meta(4096, 14336), 14336
    ),
    "quantized_linear fp8 codes of groups": lambda: scaled_linear.plan_codes(
        meta(4096, 14336), 128
    ),
    "quantized_linear fp8 rounded rows": lambda: scaled_linear.plan_rounded(meta(8, 14336), 14336),
    "quantized_linear fp8 rounded groups": lambda: scaled_linear.plan_rounded(meta(8, 14336), 128),
    "quantized_linear fp8 rows of bytes": lambda: scaled_linear.plan_rows_of(
        meta(256, 3584, 64, dtype=torch.float8_e4m3fn)
    ),
    "quantized_linear fp8 product": codes_product,
    "quantized_linear fp8 product, groups": lambda: codes_product(128),
    "quantized_expert_linear mxfp4 few": lambda: low_bit_experts(64, "mxfp4"),
    "quantized_expert_linear mxfp4 unsorted": lambda: low_bit_experts(1000, "mxfp4"),
    "quantized_expert_linear mxfp4 many": lambda: low_bit_experts(32768, "mxfp4"),
    "quantized_expert_linear mxfp4 rows": lambda: low_bit_experts(16384, "mxfp4"),
    "quantized_expert_linear int4 many": lambda: low_bit_experts(32768, "int4", minimum=True),
    "quantized_expert_linear fp8 many": lambda: low_bit_experts(32768, "fp8"),
    "quantized_expert_linear int4 few": lambda: low_bit_experts(64, "int4", minimum=True),
    "encoder_attention": lambda: encoder(4096, 64),
    "encoder_attention window": lambda: encoder(8192, 4, window=65),
    "quantized_expert_linear int8 many": lambda: low_bit_experts(32768, "int8"),
    "quantized_expert_linear int8 of tokens": lambda: low_bit_experts(1000, "int8", choices=8),
    "quantized_expert_linear fp8 few": lambda: low_bit_experts(64, "fp8"),
    "quantized_expert_linear fp8 product, few": lambda: scaled_experts(64, 128, choices=8),
    "quantized_expert_linear fp8 product, few, groups of 32": lambda: scaled_experts(1000, 32),
    "quantized_expert_linear fp8 product, rows": lambda: scaled_experts(4096, 128),
    "quantized_expert_linear fp8 product, many": lambda: scaled_experts(32768, 128),
    "quantized_expert_linear fp8 product, many, whole rows": lambda: scaled_experts(32768),
    "quantized_expert_linear mxfp4 gated few": lambda: low_bit_experts(64, "mxfp4", gate=SILU),
    "quantized_expert_linear mxfp4 gated many": lambda: low_bit_experts(32768, "mxfp4", gate=SILU),
    "quantized_expert_linear mxfp4 clamped few": lambda: low_bit_experts(64, "mxfp4", gate=CLAMPED),
    "quantized_expert_linear mxfp4 clamped many": lambda: low_bit_experts(
        32768, "mxfp4", gate=CLAMPED
    ),
    "quantized_expert_linear int4 gated few": lambda: low_bit_experts(64, "int4", gate=SILU),
    "quantized_expert_linear int8 gated many": lambda: low_bit_experts(32768, "int8", gate=SILU),
    "sum_quantized_expert_linear int4 few": lambda: low_bit_experts(
        64, "int4", minimum=True, sums=summed(8)
    ),
    "sum_quantized_expert_linear mxfp4 row": lambda: low_bit_experts(8, "mxfp4", sums=summed(1)),
    "sum_quantized_expert_linear mxfp4 few": lambda: low_bit_experts(64, "mxfp4", sums=summed(8)),
    "sum_quantized_expert_linear fp8 product, few": lambda: scaled_experts(64, 128, sums=summed(8)),
    "quantized_expert_linear fp8 product, gated few": lambda: scaled_experts(64, 128, gate=SILU),
    "quantized_expert_linear fp8 product, gated many": lambda: scaled_experts(
        32768, 128, gate=SILU
    ),
    "quantized_embedding int4": lambda: embedding(64, "int4", minimum=True),
    "quantized_embedding int8": lambda: embedding(64, "int8"),
    "quantized_embedding fp8": lambda: embedding(64, "fp8"),
    "delta_rule": lambda: delta(64, 64),
    "delta_rule prompts": lambda: delta(4096, 4),
    "delta_rule by channel": lambda: delta(64, 64, by_channel=True),
    "selective_scan by state": lambda: scan(64, 5120, 1, 16),
    "selective_scan": lambda: scan(64, 80, 64, 128),
    "selective_scan linear attention": lambda: linear_attention(64, 64, 128),
    "conv_delta_rule": lambda: conv_delta(64),
    "conv_delta_rule by channel": lambda: conv_delta(64, by_channel=True),
    "conv_scan": lambda: conv_scan(64),
    "linear_recurrence decode": lambda: recurrence(64, 64),
    "linear_recurrence prefill": lambda: recurrence(4096, 4),
    "decayed_softmax": lambda: mixing(64),
    "pool_windows": lambda: pooling(64, 64, 1, 128),
    "pool_windows overlapping": lambda: pooling(4096, 4, 2, 4),
    "causal_conv decode": lambda: conv(64, 64),
    "causal_conv prefill": lambda: conv(4096, 4),
    "causal_conv gated decode": lambda: gated_conv(64, 64),
    "causal_conv gated prefill": lambda: gated_conv(4096, 4),
}


def _packed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as from a merged projection."""
    q, k, v = meta(tokens, 48 * 128).split([32 * 128, 8 * 128, 8 * 128], dim=-1)
    return q.unflatten(-1, (32, 128)), k.unflatten(-1, (8, 128)), v.unflatten(-1, (8, 128))


def _rope_of(tokens: int) -> Plan[Tensor]:
    tables = floats(4096, 128), floats(4096, 128), longs(tokens)
    norms = meta(128), meta(128)
    return rope_write.plan(
        *_packed(tokens), *norms, 1e-6, 0.0, *tables, False, *caches(tokens)
    )  # fmt: skip


def _sample_of(rows: int) -> Plan[Tensor]:
    columns = floats(rows), ints(rows), floats(rows), floats(rows), longs(rows), longs(rows)
    return sample.plan(floats(rows, VOCAB), *columns)


# plans of one model at any number of tokens or rows
SIZED: dict[str, Callable[[int], Plan[Any]]] = {
    "round_to_fp8": lambda n: scaled_linear.plan_rounded(meta(n, 4096), 128),
    "product of fp8": lambda n: codes_product(128, rows=n),
    "write_kv": lambda n: write_kv.plan(*_packed(n)[1:], *caches(n)),
    "rope_write": _rope_of,
    "rope_write_latent": lambda n: latent_rope(n, interleaved=True),
    "sample": _sample_of,
    "sample_rows": whole_sampler,
    "token_logprobs": lambda n: token_logprobs.plan(floats(4, VOCAB), longs(4), n),
    "token_logprobs rows": lambda n: token_logprobs.plan(floats(n, VOCAB), longs(n), 5),
    "rms_norm": lambda n: norm.plan(meta(n, 4096), meta(4096), 1e-6, 0.0),
    "gated_rms_norm": lambda n: gated_norm(n, 32, 128),
    "gated_rms_norm of groups": lambda n: grouped_norm(n, 8192),
    "act_mul": lambda n: act_mul.plan(meta(n, 24576), "silu"),
    "quantized_embedding": lambda n: embedding(n, "int4"),
    "choose_experts": lambda n: choose_experts.plan(meta(n, 128), longs(n), 8, True, BF16),
    "sum_experts": lambda n: choose_experts.plan_sum(meta(8 * n, 2048), meta(n, 8), BF16),
    "delta_rule": lambda n: delta(n, n),
    "delta_rule of chunks": lambda n: delta(16 * n, n),
    "queries and keys of delta_rule": units,
    "selective_scan by state": lambda n: scan(n, 5120, 1, 16),
    "selective_scan": lambda n: scan(n, 80, 64, 128),
    "conv_delta_rule": conv_delta,
    "conv_scan": conv_scan,
    "linear_recurrence": lambda n: recurrence(n, n),
    "decayed_softmax": mixing,
    "pool_windows": lambda n: pooling(n, n, 2, 4),
    "causal_conv": lambda n: conv(n, n),
    "encoder_attention": lambda n: encoder(n, 4),
}

# ops whose launch options depend on the number of rows, in a few classes
CLASSED: dict[str, Callable[[int], Plan[Any]]] = {
    "fused_linear": lambda n: few_rows(min(n, 16), 28672, 4096, "silu"),
    "fused_linear, norm of heads": lambda n: gated_rows(min(n, 16), 4096, 128, first=False),
    "route": lambda n: router(min(n, 8), 128),
    "expert_linear": lambda n: experts(8 * n, choices=8),
    "sum_expert_linear": lambda n: experts(8 * n, sums=summed(n)),
    "quantized_linear int4": lambda n: low_bit(n, "int4", group=128),
    "quantized_linear int8": lambda n: low_bit(n, "int8"),
    "quantized_linear mxfp4": lambda n: low_bit(n, "mxfp4"),
    "quantized_expert_linear": lambda n: low_bit_experts(8 * n, "mxfp4", choices=8),
    "quantized_expert_linear of fp8": lambda n: scaled_experts(8 * n, 128, choices=8),
    "add_lora": lambda n: lora(n, 16),
}

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1024},
    "chunk": {"chunk": 8192},
    "softcap": {"softcap": 50.0},
    "sinks window": {"sinks": True, "window": 128},
    "alibi": {"alibi": True},
    "distances": {"distances": 1024, "token_sinks": True},
    "all": {"window": 64, "chunk": 128, "softcap": 5.0, "sinks": True, "alibi": True},
}
SHAPES = {"decode": (64, 64), "drafts": (256, 64), "prefill": (4096, 4)}


def sweep() -> Iterator[tuple[str, Callable[[], Plan[Any]]]]:
    """Attention, exhaustively: every flag at one head size, every head size without flags, and
    every kind of cache at some sizes."""

    def build(tokens: int, rows: int, dim: int, **features: Any) -> Callable[[], Plan[Any]]:
        return lambda: attention(tokens, rows, 16, 4, dim, **features)

    for shape, (tokens, rows) in SHAPES.items():
        for flags, features in FLAGS.items():
            yield f"{shape} {flags}", build(tokens, rows, 128, **features)
        for dim in (64, 80, 96, 112, 192, 256):
            yield f"{shape} {dim}", build(tokens, rows, dim)
        for dim in (64, 128, 256):
            yield f"{shape} {dim} float32", build(tokens, rows, dim, dtype=torch.float32)
        for dim in (64, 128, 256):
            for cache in FP8:
                yield f"{shape} {dim} {cache}", build(tokens, rows, dim, cache=cache)
        yield f"{shape} undivided", build(tokens, rows, 128, max_blocks=8)


def named_launches(plan: Plan[Any]) -> Iterator[tuple[str, Launch]]:
    for launch in plan.launches:
        yield launch.kernel.__name__, launch
