"""`image_attention`: attention of image tokens to their whole image, after causal attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.attention import attend, first_visible
from llmc.kernels.paged_attention import cached_rows, make_case
from llmc.kernels.registry import Case, op


def _shape(*, causal: Tensor, **others: object) -> Tensor:
    return torch.empty_like(causal)


@op(shape=_shape)
def image_attention(
    causal: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    attended_span: Tensor,
) -> Tensor:
    """The output of `paged_attention` [T, H, Dv], with the rows of image tokens recomputed.

    attended_span [2, T] int64: in addition to what `attention.visible` allows, token t sees
    positions attended_span[0, t] to attended_span[1, t] of its request, all of which are in this
    step. The two are equal for a token that sees nothing more. The other arguments are those of
    `paged_attention`.
    """
    out = causal.clone()
    starts = query_start.tolist()
    sees_more = (attended_span[1] > attended_span[0]).cpu()
    for r, length in enumerate(context_len.tolist()):
        first, last = starts[r], starts[r + 1]
        if length == 0 or not bool(sees_more[first:last].any()):
            continue
        first_query = length - (last - first)
        seen = first_visible(first_query, window, 0)
        rows = first + sees_more[first:last].nonzero()[:, 0].to(query.device)
        places = torch.arange(seen, length, device=query.device)
        span = attended_span[:, rows, None]
        out[rows] = attend(
            query[rows],
            cached_rows(key_cache, k_scale, block_table[r], seen, length, keys=True),
            cached_rows(value_cache, v_scale, block_table[r], seen, length, keys=False),
            rows - first + first_query,
            places,
            scale,
            window,
            0,
            softcap,
            sinks,
            None,
            also=(places >= span[0]) & (places < span[1]),
        )
    return out


@image_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for window in (0, 5):
        lengths = [(7, 9), (1, 4), (6, 6)]
        case = make_case(lengths, 4, 2, 8, 8, 4, device, dtype, window=window)
        query, key_cache, value_cache, query_start, context_len, block_table = case[:6]
        attended_span = torch.zeros(2, 14, dtype=torch.int64)
        attended_span[:, 1:4] = torch.tensor([[3], [6]])
        attended_span[:, 8:11] = torch.tensor([[0], [3]])
        causal = torch.randn(14, 4, 8).to(device, dtype)
        yield (
            *(causal, query, key_cache, value_cache, query_start, context_len, block_table),
            *(0.3, window, 0.0, None, None, None, attended_span.to(device)),
        )
