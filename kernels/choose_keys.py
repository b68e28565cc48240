"""`choose_keys`: a sparse indexer that chooses which positions each token attends to.

It has its own queries and keys, far fewer than those of attention. It scores every token of the
context and passes the best to `paged_attention`, as `chosen`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op


def _shape(*, query: Tensor, top_k: int, **others: object) -> Tensor:
    return query.new_empty(query.shape[0], top_k, dtype=torch.int32)


@op(mutates=("key_cache",), shape=_shape)
def choose_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    top_k: int,
    rate: int = 1,
) -> Tensor:
    """query [T, H, D] of R packed requests -> positions [T, top_k] int32.

    Writes key [T, D] to key_cache [num_blocks, 1, block_size, D], as `write_kv` does. Then a token
    scores each token s of its request, up to itself: the sum over h of weights[h] *
    relu(query[h] . key[s]), with weights [T, H] float32. It chooses the top_k highest scores; ties
    go to the earlier token. Positions are in ascending order, followed by -1 if there are fewer
    than top_k tokens.

    query_start, context_len and block_table as in `paged_attention`; tokens without a request
    choose none. Source: the "lightning indexer" (2025), whose positive scale does not affect the
    choice.
    rate: the number of tokens that a key stands for. Only every rate-th token of a request has a
    slot for its key; the cache stores these keys contiguously. A token at position p scores the
    first (p + 1) // rate keys, and its choices are indices of keys.
    """
    block_size, num_keys = key_cache.shape[2], block_table.shape[1] * key_cache.shape[2]
    live = slot_mapping >= 0
    slots = slot_mapping[live]
    key_cache[slots // block_size, 0, slots % block_size] = key[live]
    out = query.new_full((query.shape[0], top_k), -1, dtype=torch.int32)
    starts = query_start.tolist()
    for r, length in enumerate(context_len.tolist()):
        first, last = starts[r], starts[r + 1]
        if length == 0 or first == last:
            continue
        count = length // rate
        blocks = block_table[r, : -(-count // block_size)].long()
        keys = key_cache[blocks, 0].flatten(0, 1)[:count].float()
        products = (query[first:last].float() @ keys.T).relu()  # [Q, H, count]
        scores = (weights[first:last, :, None] * products).sum(1)
        position = torch.arange(length - (last - first), length, device=query.device)
        seen = (position + 1) // rate
        is_later = torch.arange(count, device=query.device) >= seen[:, None]
        scores = scores.masked_fill(is_later, float("-inf"))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        best = best.masked_fill(is_later.gather(1, best), num_keys).sort(dim=1).values
        out[first:last, : best.shape[1]] = best.masked_fill(best == num_keys, -1).int()
    return out


def make_case(
    lengths: list[tuple[int, int]],  # (new tokens, context after the step) of each request
    heads: int,
    dim: int,
    block_size: int,  # keys per block
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    padding: int = 0,  # tokens without a request, at the end
    rate: int = 1,
    seed: int = 0,
) -> Case:
    """Random inputs with shuffled blocks; slots that the step is to write hold NaN."""
    gen = torch.Generator(device="cpu").manual_seed(seed)
    need = [-(-context // (block_size * rate)) for _, context in lengths]
    order = torch.randperm(sum(need) + 1, generator=gen).tolist()
    cache = torch.full((len(order), 1, block_size, dim), float("nan"))
    table = torch.zeros(len(lengths), max([*need, 1]), dtype=torch.int32)
    slots: list[int] = []
    for r, (new, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(need[r])]
        table[r, : need[r]] = torch.tensor(blocks, dtype=torch.int32)
        keys = [(i + 1) // rate - 1 if i % rate == rate - 1 else -1 for i in range(context)]
        places = [
            -1 if i < 0 else blocks[i // block_size] * block_size + i % block_size for i in keys
        ]
        for place in (p for p in places[: context - new] if p >= 0):
            row = torch.randn(dim, generator=gen)
            cache[place // block_size, 0, place % block_size] = row
        slots += places[context - new :]
    slots += [-1] * padding
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    tokens = len(slots)
    return (
        torch.randn(tokens, heads, dim, generator=gen).to(device, dtype),
        torch.randn(tokens, dim, generator=gen).to(device, dtype),
        torch.randn(tokens, heads, generator=gen).to(device),
        cache.to(device, dtype),
        torch.tensor(slots, dtype=torch.int64, device=device),
        starts.to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        table.to(device),
        top_k,
        rate,
    )


@choose_keys.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    mixed = [(1, 1), (5, 5), (1, 33), (9, 40), (0, 0), (1, 16)]
    yield make_case([(1, 1)], 1, 16, 16, 4, device, dtype)
    yield make_case(mixed, 1, 32, 8, 6, device, dtype, padding=2)  # one head: many scores are 0
    yield make_case(mixed, 5, 40, 16, 12, device, dtype)
    yield make_case([(1, 200), (2, 90)], 16, 64, 16, 64, device, dtype)
    yield make_case([(3, 20)], 4, 36, 16, 100, device, dtype)  # top_k above the number of tokens
    yield make_case([*mixed, (7, 90)], 5, 40, 4, 6, device, dtype, padding=2, rate=4)
