"""`latent_attention`: attention whose cache is a latent of all heads' keys and values.

There are two ways to compute it (multi-head latent attention, https://arxiv.org/abs/2405.04434):

- Absorbed: the weight is applied to queries and outputs, and all heads attend to the latent. The
  context is read only once, which suits decoding.
- Expanded: the weight expands the whole context to keys and values, and each head attends to its
  own. Attention is then over fewer channels, which suits many new tokens.

`expands` decides per request which of them takes fewer multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.attention import attend, expand, expanded_dim, first_visible
from llmc.kernels.cache_dtype import cache_dtypes
from llmc.kernels.paged_attention import cached_rows, make_case
from llmc.kernels.registry import Case, op

LEAST_NEW = 32  # below this expanding gains nothing, and the step need not read sizes on the host
MAX_BYTES = 256 << 20  # for a context's latents and their expansion for one head


def expands(
    new: int, context: int, *, dim: int, shared: int, v_dim: int, rank: int, itemsize: int
) -> bool:
    """Whether a request with `new` tokens, the last ones of `context`, is computed expanded.

    There are P = new * context - new * (new - 1) / 2 pairs of a query and a visible key. The
    multiplications per head are

        absorbed:  new * R * (D + Dv)      + P * (2 * R + Dr)
        expanded:  context * R * (D + Dv)  + P * (D + Dr + Dv)

    and the smaller number wins. Expanding wins for all new prompts if 2 R > D + Dv, and for later
    chunks with long contexts if they have more than R (D + Dv) / (2 R - D - Dv) tokens (171 for
    R = 512, D = Dv = 128). dim is D, `shared` Dr, v_dim Dv and rank R, as in `latent_attention`. A
    context's latents and their expansion for one head must fit in MAX_BYTES, with values of
    `itemsize` bytes. One head is enough, since heads are independent and can be computed a few at a
    time.
    """
    pairs = new * context - new * (new - 1) // 2
    made = dim + v_dim
    width = rank + shared + made + dim + shared
    return (
        LEAST_NEW <= new <= context
        and (context - new) * rank * made < pairs * (2 * rank - made)
        and context * width * itemsize <= MAX_BYTES
    )


def new_result(*, query: Tensor, weight: Tensor, key_cache: Tensor, **others: object) -> Tensor:
    tokens, heads, dim = query.shape
    return query.new_empty(tokens, heads, expanded_dim(dim, heads, weight, key_cache.shape[3]))


@op(shape=new_result)
def latent_attention(
    query: Tensor,
    weight: Tensor,
    key_cache: Tensor,
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
    """query [T, H, D + Dr] of R packed requests -> [T, H, Dv] in query's dtype.

    key_cache [num_blocks, 1, block_size, R + Dr]: each token's latent, then the last Dr channels
    of every head's key. weight [H * (D + Dv), R]: for each head, the first D channels of its key,
    then its value, as a linear of the latent. The other arguments are those of `paged_attention`.
    `prompts` says which requests can be computed expanded if sizes on the device can't be read.
    Attention with a window or chunks is never expanded. Both ways give the same result up to
    rounding.
    """
    heads, dim = query.shape[1:]
    out = query.new_zeros(new_result(query=query, weight=weight, key_cache=key_cache).shape)
    starts = query_start.tolist()
    for r, length in enumerate(context_len.tolist()):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        first_query = length - (last - first)
        seen = first_visible(first_query, window, chunk)
        latent = cached_rows(key_cache, k_scale, block_table[r], seen, length, keys=True)
        key_pos = torch.arange(seen, length, device=query.device)
        out[first:last] = attend(
            query[first:last],
            *expand(latent, weight, heads, dim),
            key_pos[first_query - seen :],
            key_pos,
            scale,
            window,
            chunk,
            softcap,
            sinks,
            slopes,
        )
    return out


def make_latent_case(
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
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
) -> Case:
    """Random inputs with shuffled blocks, like those of `make_case`."""
    case = make_case(
        lengths, heads, 1, rank + shared, rank, block_size, device, dtype,
        cache=cache, window=window, softcap=softcap, sinks=sinks, alibi=alibi, shared=True,
    )  # fmt: skip
    gen = torch.Generator(device="cpu").manual_seed(1)
    query = torch.randn(case[0].shape[0], heads, dim + shared, generator=gen)
    weight = torch.randn(heads * (dim + v_dim), rank, generator=gen) * rank**-0.5
    # half the usual scale, so that intermediate rounding changes scores less
    scale = 0.5 * (dim + shared) ** -0.5
    inputs = (query.to(device, dtype), weight.to(device, dtype), case[1])
    return (*inputs, *case[3:6], scale, *case[7:12], case[12])


@latent_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    mixed = [(1, 30), (5, 5), (40, 40), (1, 9), (0, 0), (34, 50), (36, 400), (9, 33)]
    yield make_latent_case([(1, 1)], 1, 16, 8, 16, 40, 16, device, dtype)
    yield make_latent_case([(1, 70), (3, 3), (1, 9)], 4, 16, 8, 24, 48, 16, device, dtype)
    yield make_latent_case([(16, 20)], 3, 12, 6, 10, 40, 8, device, dtype)
    yield make_latent_case(mixed, 4, 12, 6, 10, 40, 8, device, dtype)
    for cache in cache_dtypes(dtype)[1:-2]:
        yield make_latent_case(mixed, 3, 16, 8, 16, 64, 16, device, dtype, cache=cache)
    yield make_latent_case(
        mixed, 2, 16, 8, 12, 48, 16, device, dtype, softcap=5.0, sinks=True, alibi=True
    )
    yield make_latent_case(mixed, 4, 16, 8, 16, 48, 8, device, dtype, window=11)
    yield make_latent_case([(33, 33), (1, 8)], 4, 24, 8, 24, 20, 8, device, dtype)
