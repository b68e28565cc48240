"""`choose_blocks`: a sparse indexer that chooses which blocks of its context each token attends to.

As in `choose_keys`, the indexer has its own queries and keys, but here a block is scored by its
best key, and every head chooses separately.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels import choose_keys
from llmc.kernels.registry import Case, op


def _shape(*, query: Tensor, top_k: int, **others: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], top_k, dtype=torch.int32)


@op(mutates=("key_cache",), shape=_shape)
def choose_blocks(
    query: Tensor,
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    top_k: int,
    sparse_block_size: int,
    recent: int,
) -> Tensor:
    """query [T, H, D] of R packed requests -> blocks [T, H, top_k] int32.

    Writes key [T, D] to key_cache [num_blocks, 1, block_size, D], as `write_kv` does. A request's
    sparse block i is the sparse_block_size positions from i * sparse_block_size on. For each head
    of a token, its score is the maximum of query[h] . key[s] over its positions s up to the token's
    own. The head chooses the `recent` last blocks, including the token's own, and fills the rest of
    top_k with the highest scores; ties go to the earlier block. Blocks are in ascending order,
    followed by -1 if there are fewer than top_k.

    query_start, context_len and block_table as in `paged_attention`; tokens without a request
    choose none. Source: block-sparse attention with a max-pooled indexer (2025).
    """
    block_size = key_cache.shape[2]
    live = slot_mapping >= 0
    slots = slot_mapping[live]
    key_cache[slots // block_size, 0, slots % block_size] = key[live]
    out = query.new_full((*query.shape[:2], top_k), -1, dtype=torch.int32)
    starts = query_start.tolist()
    for r, length in enumerate(context_len.tolist()):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        blocks = block_table[r, : -(-length // block_size)].long()
        keys = key_cache[blocks, 0].flatten(0, 1)[:length].float()
        products = query[first:last].float() @ keys.T  # [Q, H, length]
        position = torch.arange(length, device=query.device)
        own = position[length - (last - first) :, None, None]
        products = products.masked_fill(position > own, float("-inf"))
        count = -(-length // sparse_block_size)
        padded = torch.nn.functional.pad(
            products, (0, count * sparse_block_size - length), value=float("-inf")
        )
        scores = padded.unflatten(2, (count, sparse_block_size)).amax(3)
        number = torch.arange(count, device=query.device)
        is_recent = (number <= own // sparse_block_size) & (
            number > own // sparse_block_size - recent
        )
        scores = scores.masked_fill(is_recent, float("inf"))
        best = scores.sort(dim=2, descending=True, stable=True).indices[..., :top_k]
        best = best.masked_fill(best > own // sparse_block_size, count).sort(dim=2).values
        out[first:last, :, : best.shape[2]] = best.masked_fill(best == count, -1).int()
    return out


@choose_blocks.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    mixed = [(1, 1), (5, 5), (1, 33), (9, 40), (0, 0), (1, 16)]
    yield _case([(1, 1)], 1, 16, 16, 4, 4, 1, device, dtype)
    yield _case(mixed, 1, 32, 8, 3, 4, 0, device, dtype, padding=2)
    yield _case(mixed, 3, 40, 16, 4, 3, 2, device, dtype)
    yield _case([(1, 300), (2, 90)], 4, 64, 16, 3, 64, 1, device, dtype)
    yield _case([(1, 40), (7, 20)], 2, 2, 8, 5, 1, 0, device, dtype)  # blocks of one token
    yield _case([(3, 20)], 2, 36, 16, 50, 2, 1, device, dtype)  # top_k above the number of blocks


def _case(
    lengths: list[tuple[int, int]],
    heads: int,
    dim: int,
    block_size: int,
    top_k: int,
    sparse_block_size: int,
    recent: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    padding: int = 0,
) -> Case:
    query, key, _, *step, _, _ = choose_keys.make_case(
        lengths, heads, dim, block_size, top_k, device, dtype, padding=padding
    )
    return (query, key, *step, top_k, sparse_block_size, recent)
