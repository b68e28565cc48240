"""`encoder_attention`: bidirectional attention over packed sequences."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llmc.kernels.attention import attend, within
from llmc.kernels.registry import Case, op
from llmc.kernels.torch_impl import torch_impl

# Queries per tile when attention has a window.
_BAND = 256


def _shape(*, query: Tensor, value: Tensor, **others: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@op(shape=_shape)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv] of R sequences -> [T, H, Dv].

    query_start [R + 1] int32: sequence r is the tokens query_start[r] to query_start[r + 1]; it is
    complete. A token sees the tokens of its sequence less than `window` positions away, in both
    directions; 0: all. Computed in float32; the result has query's dtype. Rows past query_start[R]
    are zero.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    bounds = query_start.tolist()
    for first, last in zip(bounds, bounds[1:], strict=False):
        if first == last:
            continue
        places = torch.arange(last - first, device=query.device)
        out[first:last] = attend(
            query[first:last],
            key[first:last],
            value[first:last],
            places,
            places,
            scale,
            window,
            0,
            0.0,
            None,
            None,
            also=within(places, places, window),
        )
    return out


@torch_impl(encoder_attention, lambda *, query, **others: query.device.type == "cpu")
def _by_text(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, scale: float, window: int
) -> Tensor:
    """Call torch's attention per sequence, in float32: 16-bit products are slow on many CPUs."""
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    bounds = query_start.tolist()
    q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))  # [1, H, T, D]
    grouped = query.shape[1] != key.shape[1]
    for first, last in zip(bounds, bounds[1:], strict=False):
        size = _BAND if 0 < window < last - first else last - first
        for start in range(first, last, size or 1):
            end = min(start + size, last)
            low, high = (max(first, start - window + 1), min(last, end + window - 1))
            if not window:
                low, high = first, last
            seen = None
            if low > first or high < last or 0 < window < last - first:
                seen = within(torch.arange(start, end), torch.arange(low, high), window)
            found = scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, low:high],
                v[:, :, low:high],
                attn_mask=seen,
                scale=scale,
                enable_gqa=grouped,
            )
            out[start:end] = found[0].transpose(0, 1).to(out.dtype)
    return out


def make_case(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int = 0,
    padding: int = 0,  # rows past the last sequence
) -> Case:
    gen = torch.Generator(device="cpu").manual_seed(0)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(starts[-1]) + padding
    query, key, value = (
        torch.randn(tokens, n, width, generator=gen).to(device, dtype)
        for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    return (query, key, value, starts.to(device), dim**-0.5, window)


@encoder_attention.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    yield make_case([1], 1, 1, 16, 16, device, dtype)
    yield make_case([5, 0, 33, 1, 16], 4, 4, 32, 32, device, dtype)
    yield make_case([70, 3], 4, 2, 48, 32, device, dtype, padding=3)
    yield make_case([40, 9, 70], 6, 2, 64, 64, device, dtype, window=7)
    yield make_case([90], 2, 2, 16, 16, device, dtype, window=33)
