"""`rope_attention`: `rope_write` and the attention that reads what it wrote, as one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import FP8, cache_dtypes, indexable, row_scales
from llmc.kernels.paged_attention import make_case, paged_attention
from llmc.kernels.registry import Case, op
from llmc.kernels.rope_write import rope_write


def _shape(*, query: Tensor, value_cache: Tensor, **others: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])


@op(mutates=("key_cache", "value_cache"), shape=_shape)
def rope_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    norm_offset: float,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    interleaved: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
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
    prompts: Tensor | None = None,
    norm_last: bool = False,
) -> Tensor:
    """query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, H, Dv] in query's dtype.

    The arguments are those of `rope_write`, then those of `paged_attention`. Where the tables have
    no columns, nothing is rotated. The slot of a token of
    a request with a context is where `block_table` has its position, or negative; those of other
    tokens are negative. No request reads or writes a block to which another one writes.
    """
    rotated = rope_write.reference(
        query, key, value, query_norm, key_norm, eps, norm_offset, cos_table, sin_table, positions,
        interleaved, key_cache, value_cache, slot_mapping, k_scale, v_scale, norm_last,
    )  # fmt: skip
    out: Tensor = paged_attention.reference(
        rotated, key_cache, value_cache, query_start, context_len, block_table, scale, window,
        chunk, softcap, sinks, slopes, k_scale, v_scale, prompts,
    )  # fmt: skip
    return out


def place_new_tokens(
    of: dict[str, Any], lengths: list[tuple[int, int]], block_size: int, padding: int
) -> tuple[list[int], list[int]]:
    """The slots and positions of a case's new tokens and, in a last request without a context, of
    `padding`. The arguments `of` the attention get that request, and the slots in its caches NaN,
    since the op must write them."""
    table = of["block_table"].cpu()
    slots, positions = [], []
    for r, (new, context) in enumerate(lengths):
        for position in range(context - new, context):
            block = int(table[r, position // block_size])
            slots.append(block * block_size + position % block_size)
            positions.append(position)
    for cache in (cache for name, cache in of.items() if name.endswith("_cache")):
        stored = torch.tensor(slots, dtype=torch.int64, device=cache.device)
        blocks, offset = stored // block_size, stored % block_size
        if cache.dtype == torch.int8:
            row_scales(cache)[blocks, :, offset] = float("nan")
            continue
        indexable(cache)[blocks, :, offset] = 0x7F if cache.dtype in FP8 else float("nan")
    if padding:
        of["query_start"] = torch.cat([of["query_start"], of["query_start"][-1:] + padding])
        for name in ("context_len", "block_table"):
            of[name] = torch.cat([of[name], torch.zeros_like(of[name][:1])])
    return slots + [-1] * padding, positions + [0] * padding


def make_rope_case(
    lengths: list[tuple[int, int]],  # (new tokens, context after the step) of each request
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int | None = None,  # rotated channels; None: all
    interleaved: bool = False,
    normed: bool = True,
    together: bool = False,  # all heads are normalized together
    norm_last: bool = False,
    padding: int = 0,  # tokens of a last request without a context
    seed: int = 0,
    **features: Any,  # of `make_case`
) -> Case:
    """Random inputs."""
    case = make_case(
        lengths, heads, kv_heads, dim, v_dim, block_size, device, dtype, seed=seed, **features
    )
    of = paged_attention.bind(case)
    gen = torch.Generator(device="cpu").manual_seed(seed + 1)
    tokens, width = of["query"].shape[0] + padding, dim if width is None else width
    slots, place = place_new_tokens(of, lengths, block_size, padding)
    packed = torch.randn(tokens, (heads + kv_heads) * dim + kv_heads * v_dim, generator=gen)
    q, k, v = packed.to(device, dtype).split([heads * dim, kv_heads * dim, kv_heads * v_dim], -1)
    angle = torch.rand(max(place) + 2, width // 2, generator=gen) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    widths = (heads * dim, kv_heads * dim) if together else (dim, dim)
    norms = [torch.randn(n, generator=gen).to(device, dtype) if normed else None for n in widths]
    names = ("query_start", "context_len", "block_table", "scale", "window", "chunk", "softcap")
    return (
        q.unflatten(-1, (heads, dim)),
        k.unflatten(-1, (kv_heads, dim)),
        v.unflatten(-1, (kv_heads, v_dim)),
        *norms,
        1e-6,
        0.5 * normed,
        angle.cos().to(device),
        angle.sin().to(device),
        torch.tensor(place, device=device) + 1,  # as with a position offset
        interleaved,
        of["key_cache"],
        of["value_cache"],
        torch.tensor(slots, dtype=torch.int64, device=device),
        *(of[name] for name in names),
        of["sinks"],
        of["slopes"],
        of["k_scale"],
        of["v_scale"],
        None,
        norm_last,
    )


@rope_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    decode = [(1, 1), (1, 33), (0, 0), (1, 16), (1, 40)]
    few = [(3, 20), (0, 0), (0, 0), (2, 2), (0, 0), (0, 0)]
    yield make_rope_case([(1, 1)], 1, 1, 16, 16, 16, device, dtype)
    yield make_rope_case(decode, 4, 2, 64, 64, 16, device, dtype, padding=1)
    yield make_rope_case(decode, 4, 2, 64, 64, 16, device, dtype, width=32, norm_last=True)
    yield make_rope_case(decode, 4, 2, 64, 64, 16, device, dtype, together=True, padding=1)
    yield make_rope_case(decode, 6, 1, 80, 48, 8, device, dtype, width=32, together=True)
    yield make_rope_case(few, 6, 3, 48, 32, 8, device, dtype, interleaved=True, together=True)
    yield make_rope_case(decode, 4, 4, 40, 32, 8, device, dtype, cache=torch.int8, together=True)
    yield make_rope_case(decode, 4, 1, 80, 48, 8, device, dtype, width=32, normed=False)
    yield make_rope_case(decode, 4, 1, 80, 48, 8, device, dtype, width=0, normed=False)
    yield make_rope_case(decode, 4, 4, 32, 32, 8, device, dtype, width=0, alibi=True, normed=False)
    yield make_rope_case(decode, 6, 2, 48, 32, 16, device, dtype, width=0)
    yield make_rope_case(decode, 6, 2, 48, 32, 16, device, dtype, interleaved=True, softcap=5.0)
    yield make_rope_case(decode, 8, 2, 64, 64, 32, device, dtype, sinks=True, window=20)
    yield make_rope_case(few, 4, 4, 32, 32, 8, device, dtype, chunk=12, padding=1)
    yield make_rope_case(few, 40, 2, 32, 32, 8, device, dtype, window=3, alibi=True)
    yield make_rope_case(decode, 6, 2, 64, 48, 16, device, dtype, cache=torch.int8)
    yield make_rope_case(decode, 4, 4, 40, 32, 8, device, dtype, cache=torch.int8, window=7)
    for cache in cache_dtypes(dtype)[1 : -len(FP8) - 1]:
        yield make_rope_case(decode, 6, 2, 64, 48, 16, device, dtype, cache=cache)
    yield make_rope_case(decode, 8, 2, 64, 48, 16, device, dtype, cache=FP8[0], normed=False)
    yield make_rope_case(decode, 4, 4, 40, 32, 8, device, dtype, cache=FP8[1], window=7)
    yield make_rope_case([(5, 5), (1, 33), (9, 40)], 4, 2, 32, 32, 16, device, dtype)
    several = ([(5, 5), (9, 40)], 4, 2, 32, 32, 16, device, dtype)
    yield make_rope_case(*several, width=0)
    yield make_rope_case(*several, together=True)
    yield make_rope_case(*several, width=0, normed=False)
