"""`entries` and `entry_attention`: markers for attention to tokens and to compressed entries.

An entry is a key, which is also its value, that stands for several tokens. Captured code
concatenates the keys of the tokens and the entries and passes both to attention: `entries` marks
the entries, `find_entries` turns the two into `entry_attention`, and `page_entries` stores both in
one paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.attention import attend, visible
from llmc.kernels.registry import Case, op


@op(shape="entry")
def entries(
    entry: Tensor,
    index_query: Tensor | None,
    index_key: Tensor | None,
    index_weights: Tensor | None,
    rate: int,
    top_k: int,
) -> Tensor:
    """The entries [T, D] themselves, with what `entry_attention` needs to know about them."""
    return entry.clone()


def _shape(*, query: Tensor, entry: Tensor, **others: object) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, entry.shape[1])


@op(shape=_shape)
def entry_attention(
    query: Tensor,
    key: Tensor,
    entry: Tensor,
    index_query: Tensor | None,
    index_key: Tensor | None,
    index_weights: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    rate: int,
    top_k: int,
) -> Tensor:
    """query [1, H, T, D], key [1, 1, T, D], entry [T, D] -> [1, T, H, D], over one sequence.

    A softmax over the tokens within the window and over entries, whose keys are also their values.
    Row t of `entry` is an entry if t + 1 is a multiple of `rate`, and tokens from t on see it. With
    an index, they see only the top_k entries with the highest scores, as in `choose_keys`:
    index_query [T, H', Di], index_key [T, Di] for the rows of `entry`, index_weights [T, H']
    float32. The caches are not read; sinks and softcap as in `paged_attention`.
    """
    pos = torch.arange(query.shape[2], device=query.device)
    ends = pos % rate == rate - 1
    seen = visible(pos, pos, 0, 0) & ends
    if index_query is not None and index_key is not None and index_weights is not None:
        products = torch.einsum("qhd,kd->qhk", index_query.float(), index_key.float()).relu()
        scores = (index_weights[:, :, None] * products).sum(1).masked_fill(~seen, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        seen = seen & torch.zeros_like(seen).scatter(1, best, True)
    rows = torch.cat((key[0, 0], entry))[:, None]
    shown = torch.cat((visible(pos, pos, window, 0), seen), dim=1)[None]
    nowhere = torch.zeros_like(pos).repeat(2)
    q = query[0].transpose(0, 1)
    return attend(q, rows, rows, pos, nowhere, scale, 0, 0, softcap, sinks, None, shown)[None]


def _draws(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Arguments of `entries`, without an index and with one."""
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    yield rand(9, 6), None, None, None, 3, 0
    yield rand(9, 6), rand(9, 2, 5), rand(9, 5), rand(9, 2).float(), 2, 2


@entries.cases
def _entry_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    yield from _draws(device, dtype)


@entry_attention.cases
def _attention_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator().manual_seed(1)
    for entry, *index, rate, top_k in _draws(device, dtype):
        query = torch.randn(1, 4, 9, 6, generator=gen).to(device, dtype)
        key = torch.randn(1, 1, 9, 6, generator=gen).to(device, dtype)
        sinks = torch.randn(4, generator=gen).to(device)
        cache = query.new_empty(0)
        yield query, key, entry, *index, cache, cache, 0.4, 4, 0.0, sinks, rate, top_k
