"""`paged_attention`: packed queries against the paged cache, prefill and decode in one step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.attention import among, attend, first_visible
from llmc.kernels.cache_dtype import (
    FP8,
    block_tokens,
    cache_dtypes,
    read_blocks,
    to_cache,
    to_int8_blocks,
)
from llmc.kernels.registry import Case, op


def _shape(*, query: Tensor, value_cache: Tensor, v_dim: int, **others: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], v_dim or value_cache.shape[3])


@op(shape=_shape)
def paged_attention(
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
    prompts: Tensor | None = None,
    chosen: Tensor | None = None,
    sparse_block_size: int = 1,
    v_dim: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """query [T, H, D] of R packed requests -> [T, H, Dv] in query's dtype.

    key_cache [num_blocks, Hkv, block_size, D], value_cache [num_blocks, Hkv, block_size, Dv];
    the keys and values of this step are already in them. query_start [R + 1] int32: request r owns
    queries query_start[r] to query_start[r + 1]. context_len [R] int32: its tokens after this step,
    of which its queries are the last. block_table [R, max_blocks] int32.

    window, chunk (0: off): see `attention.visible`. softcap (0: off): cap * tanh(score / cap).
    sinks [H], or [T, H] for each query: a logit per head without a value.
    slopes [H]: ALiBi, slope * (key pos - query pos).
    Caches have one of the query's cache_dtypes, if float8 with k_scale and v_scale
    (`cache_dtype.py`); int8 is not supported together with chosen or v_dim.
    prompts, on the host: which requests are prompts (`prompts.py`), a hint that does not change
    results.
    chosen [T, G, N] int32: the sparse blocks that each query attends to, up to itself, without
    duplicates. Negative ones are unused; each query has at least one key. Sparse block i is the
    sparse_block_size positions from i * sparse_block_size on. G is 1, or Hkv, in which case the
    heads of each KV head have their own blocks. No other keys are read. Not supported together with
    window, chunk or slopes.
    v_dim (0: off): values are the first v_dim channels of the keys, with the keys' scale;
    value_cache has width 0, and v_scale is None. Not supported together with chosen.
    distance_bias [T, H, E], in query's dtype or float32: what a query adds to its scores of keys 0
    to E - 1 positions before it (0 for keys farther away). Not supported together with chosen.
    Blocks before the first one visible to a request's queries are never read and can hold anything.
    A request with context_len 0 or without queries is padding: its outputs are zero, as are those
    of queries past query_start[R].
    """

    if v_dim:
        value_cache, v_scale = key_cache[..., :v_dim], k_scale
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[3])
    starts = query_start.tolist()
    for r, length in enumerate(context_len.tolist()):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        first_query = length - (last - first)
        seen = first_visible(first_query, window, chunk)
        key_pos = torch.arange(seen, length, device=query.device)
        values = cached_rows(value_cache, v_scale, block_table[r], seen, length, keys=v_dim > 0)
        allowed = None
        if chosen is not None:
            allowed = among(chosen[first:last], sparse_block_size, length)
            values = values.masked_fill(~allowed.any(1).T[:, :, None], 0.0)
        out[first:last] = attend(
            query[first:last],
            cached_rows(key_cache, k_scale, block_table[r], seen, length, keys=True),
            values,
            key_pos[first_query - seen :],
            key_pos,
            scale,
            window,
            chunk,
            softcap,
            sinks if sinks is None or sinks.dim() == 1 else sinks[first:last],
            slopes,
            allowed,
            distance_bias=None if distance_bias is None else distance_bias[first:last],
        )
    return out


def cached_rows(
    cache: Tensor, scale: Tensor | None, table: Tensor, first: int, last: int, *, keys: bool
) -> Tensor:
    """The rows [last - first, Hkv, D] of positions [first, last) in a cache of `keys` or values,
    for a request with blocks `table` [max_blocks] int32; read as in `cache_dtype.py`."""
    block_size = block_tokens(cache)
    blocks = table[first // block_size : -(-last // block_size)].long()
    rows = read_blocks(cache, blocks, scale, keys=keys).flatten(0, 1)
    return rows[first % block_size :][: last - first]


def make_case(
    lengths: list[tuple[int, int]],  # (new tokens, context after the step) of each request
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    cache: torch.dtype | None = None,  # None: dtype
    chosen: int = 0,  # maximum number of sparse blocks per query; 0: all keys
    groups: int = 1,
    sparse_block_size: int = 1,
    shared: bool = False,  # values are the first channels of the keys
    token_sinks: bool = False,  # sinks per query
    distances: int = 0,  # number of distances that queries have a bias for; 0: none
    seed: int = 0,
) -> Case:
    """Random inputs with shuffled blocks; blocks that are not owned or not visible hold NaN.

    A float8 cache has one scale for all keys and one per head for values.
    """
    gen = torch.Generator(device="cpu").manual_seed(seed)
    need = [(context + block_size - 1) // block_size for _, context in lengths]
    num_blocks = sum(need) + 2
    order = torch.randperm(num_blocks, generator=gen).tolist()
    table = torch.zeros(len(lengths), max([*need, 1]), dtype=torch.int32)
    owned: list[int] = []
    for r, count in enumerate(need):
        blocks = [order.pop() for _ in range(count)]
        new, context = lengths[r]
        owned += blocks[first_visible(context - new, window, chunk) // block_size :]
        table[r, :count] = torch.tensor(blocks, dtype=torch.int32)
    k_scale, v_scale = (torch.rand(n, generator=gen) + 0.1 for n in (1, kv_heads))
    cached = cache or dtype

    def filled(width: int, scale: Tensor, *, keys: bool) -> Tensor:
        whole = torch.full((num_blocks, kv_heads, block_size, width), float("nan"))
        whole[owned] = torch.randn(len(owned), kv_heads, block_size, width, generator=gen)
        if cached == torch.int8:
            return to_int8_blocks(whole, keys=keys).to(device)
        stored = to_cache(whole.transpose(1, 2), cached, scale)
        return stored.transpose(1, 2).contiguous().to(device)

    key_cache = filled(dim, k_scale, keys=True)
    value_cache = filled(0 if shared else v_dim, v_scale, keys=False)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads, dim, generator=gen)
    logits = torch.randn(heads, generator=gen) if sinks else None
    if token_sinks:
        logits = torch.randn(len(query), heads, generator=gen)
    choices: Case = ()
    if chosen:
        numbers = _choose(lengths, groups, chosen, sparse_block_size, gen)
        choices = (None, numbers.to(device), sparse_block_size)
    elif shared:
        choices = (None, None, 1, v_dim)
    if distances:
        bias = torch.randn(len(query), heads, distances, generator=gen)
        choices = (*(choices or (None, None, 1, 0)), bias.to(device, dtype))
    return (
        query.to(device, dtype),
        key_cache,
        value_cache,
        starts.to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        table.to(device),
        dim**-0.5,
        window,
        chunk,
        softcap,
        None if logits is None else logits.to(device, dtype),
        (2.0 ** -torch.arange(1, heads + 1).float()).to(device) if alibi else None,
        k_scale.to(device) if cached in FP8 else None,
        v_scale.to(device) if cached in FP8 and not shared else None,
        *choices,
    )


def _choose(
    lengths: list[tuple[int, int]],
    groups: int,
    most: int,
    sparse_block_size: int,
    gen: torch.Generator,
) -> Tensor:
    """[T, groups, most] int32: sparse blocks up to each query's own, in any order, then -1."""
    rows = []
    for new, context in lengths:
        for position in [p for p in range(context - new, context) for _ in range(groups)]:
            some = torch.randperm(position // sparse_block_size + 1, generator=gen)[:most]
            rows.append(torch.nn.functional.pad(some, (0, most - len(some)), value=-1))
    return torch.stack(rows).int().view(-1, groups, most)


@paged_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    mixed = [(1, 1), (5, 5), (1, 33), (9, 40), (0, 0), (1, 16)]
    yield make_case([(1, 1)], 1, 1, 16, 16, 16, device, dtype)
    yield make_case([(1, 70), (1, 3)], 4, 2, 64, 64, 16, device, dtype)
    yield make_case(mixed, 4, 1, 80, 80, 8, device, dtype)
    yield make_case(mixed, 6, 2, 48, 32, 16, device, dtype, softcap=5.0)
    yield make_case(mixed, 4, 4, 32, 32, 16, device, dtype, window=7)
    yield make_case(mixed, 4, 2, 32, 32, 16, device, dtype, chunk=12)
    yield make_case(mixed, 8, 2, 64, 64, 32, device, dtype, sinks=True, window=20)
    yield make_case(mixed, 4, 4, 32, 32, 16, device, dtype, alibi=True)
    yield make_case(mixed, 8, 2, 64, 48, 16, device, dtype, cache=FP8[0], sinks=True)
    yield make_case(mixed, 4, 4, 40, 32, 8, device, dtype, cache=FP8[1], window=7)
    yield make_case([(1, 70), (12, 60)], 16, 1, 64, 64, 16, device, dtype, cache=FP8[0])
    for block_size, window, chunk in ((16, 0, 0), (8, 20, 0), (32, 0, 12)):
        yield make_case(
            mixed, 6, 2, 64, 128, block_size, device, dtype,
            cache=torch.int8, window=window, chunk=chunk, sinks=True,
        )  # fmt: skip
    yield make_case(mixed, 4, 4, 44, 20, 16, device, dtype, cache=torch.int8, softcap=5.0)
    yield make_case([(1, 170), (70, 90)], 9, 3, 64, 64, 16, device, dtype, cache=torch.int8)
    yield make_case([(1, 70), (12, 60)], 16, 1, 80, 64, 16, device, dtype, cache=torch.int8)
    for cache in cache_dtypes(dtype)[1 : -len(FP8) - 1]:
        yield make_case(mixed, 6, 2, 48, 40, 16, device, dtype, cache=cache, window=20)
        yield make_case([(1, 170), (70, 90)], 9, 3, 64, 64, 16, device, dtype, cache=cache)
        yield make_case([(1, 70), (3, 60)], 4, 1, 64, 64, 16, device, dtype, chosen=9, cache=cache)
        yield make_case(mixed, 4, 1, 48, 40, 8, device, dtype, shared=True, cache=cache)
    yield make_case([(1, 40), (3, 21)], 4, 2, 512, 512, 16, device, dtype)
    yield make_case(mixed, 4, 2, 32, 32, 16, device, dtype, distances=9, token_sinks=True)
    yield make_case(mixed, 6, 2, 40, 24, 8, device, dtype, distances=7, window=7, softcap=5.0)
    yield make_case(mixed, 4, 4, 48, 32, 8, device, dtype, chosen=9)
    yield make_case(mixed, 6, 2, 40, 36, 16, device, dtype, chosen=20, sinks=True, softcap=5.0)
    yield make_case([(1, 170), (3, 90)], 4, 1, 64, 64, 16, device, dtype, chosen=80, cache=FP8[0])
    yield make_case(mixed, 8, 2, 32, 32, 8, device, dtype, chosen=3, groups=2, sparse_block_size=4)
    # blocks with more rows than tokens (page_entries)
    yield make_case(mixed, 4, 1, 32, 32, 17, device, dtype, chosen=12, sinks=True)
    yield make_case(mixed, 16, 1, 40, 32, 8, device, dtype, shared=True)
    yield make_case(mixed, 6, 2, 72, 64, 16, device, dtype, shared=True, window=7, sinks=True)
    yield make_case(mixed, 4, 1, 48, 40, 8, device, dtype, shared=True, cache=FP8[0])
    yield make_case([(1, 40), (3, 21)], 8, 1, 576, 512, 16, device, dtype, shared=True)
    yield make_case(
        [(1, 200), (9, 60)], 4, 2, 48, 32, 16, device, dtype, chosen=5, sparse_block_size=12
    )
