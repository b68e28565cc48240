"""`rope_latent_attention`: `rope_write_latent` and the attention that reads what it wrote."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.cache_dtype import cache_dtypes
from llmc.kernels.latent_attention import latent_attention, make_latent_case, new_result
from llmc.kernels.registry import Case, op
from llmc.kernels.rope_attention import place_new_tokens
from llmc.kernels.rope_write_latent import rope_write_latent


@op(mutates=("key_cache",), shape=new_result)
def rope_latent_attention(
    query: Tensor,
    latent: Tensor,
    shared: Tensor,
    latent_norm: Tensor | None,
    eps: float,
    norm_offset: float,
    cos_table: Tensor,
    sin_table: Tensor,
    positions: Tensor,
    interleaved: bool,
    weight: Tensor,
    key_cache: Tensor,
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
    prompts: Tensor | None = None,
) -> Tensor:
    """query [T, H, D + Dr], latent [T, R], shared [T, Dr] -> [T, H, Dv] in query's dtype.

    The arguments are those of `rope_write_latent`, then those of `latent_attention`. The slot of a
    token of a request with a context is where `block_table` has its position, or negative; those of
    other tokens are negative.
    """
    rotated = rope_write_latent.reference(
        query, latent, shared, latent_norm, eps, norm_offset, cos_table, sin_table, positions,
        interleaved, key_cache, slot_mapping, k_scale,
    )  # fmt: skip
    out: Tensor = latent_attention.reference(
        rotated, weight, key_cache, query_start, context_len, block_table, scale, window, chunk,
        softcap, sinks, slopes, k_scale, prompts,
    )  # fmt: skip
    return out


def make_rope_latent_case(
    lengths: list[tuple[int, int]],  # (new tokens, context after the step) of each request
    heads: int,
    dim: int,
    shared: int,
    v_dim: int,
    rank: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cache: torch.dtype | None = None,
    interleaved: bool = False,
    normed: bool = True,
    padding: int = 0,  # tokens of a last request without a context
) -> Case:
    """Random inputs."""
    case = make_latent_case(
        lengths, heads, dim, shared, v_dim, rank, block_size, device, dtype, cache=cache
    )
    of = latent_attention.bind(case)
    gen = torch.Generator(device="cpu").manual_seed(2)
    slots, places = place_new_tokens(of, lengths, block_size, padding)
    if padding:
        of["query"] = torch.cat([of["query"], of["query"][:1].expand(padding, -1, -1)])
    positions = torch.tensor(places, device=device)
    merged = torch.randn(len(positions), rank + shared + 3, generator=gen).to(device, dtype)
    latent, key, _ = merged.split([rank, shared, 3], dim=-1)
    angle = torch.rand(int(positions.max()) + 2, shared // 2, generator=gen) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    norm = torch.randn(rank, generator=gen).to(device, dtype) if normed else None
    names = ("query_start", "context_len", "block_table", "scale", "window", "chunk", "softcap")
    return (
        of["query"], latent, key, norm, 1e-6, 0.5, angle.cos().to(device), angle.sin().to(device),
        positions, interleaved, of["weight"], of["key_cache"],
        torch.tensor(slots, device=device), *(of[name] for name in names),
        of["sinks"], of["slopes"], of["k_scale"],
    )  # fmt: skip


@rope_latent_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    few = [(1, 30), (1, 1), (5, 9)]
    yield make_rope_latent_case([(1, 1)], 1, 16, 8, 16, 40, 16, device, dtype)
    yield make_rope_latent_case(few, 3, 12, 6, 10, 40, 8, device, dtype, padding=2)
    yield make_rope_latent_case(few, 4, 16, 8, 24, 48, 16, device, dtype, interleaved=True)
    yield make_rope_latent_case([(16, 40)], 2, 16, 16, 16, 32, 16, device, dtype, normed=False)
    yield make_rope_latent_case([(20, 20), (1, 3)], 2, 16, 8, 16, 40, 16, device, dtype)
    for cache in cache_dtypes(dtype)[1:]:
        if cache != torch.int8:  # which no fast version of the attention reads
            yield make_rope_latent_case(few, 3, 16, 8, 16, 64, 16, device, dtype, cache=cache)
