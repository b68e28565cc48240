"""Packed requests <-> padded rows, shared by the ops that carry a state from token to token.

The T tokens of R requests are packed end to end: `query_start` [R + 1] says where each request
begins, `context_len` [R] how many tokens it has after this step, and `request_row` [R] which slot
holds its state. A request whose tokens are all in this step is fresh: it starts from zero, whatever
its slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request of a step: its tokens [first, last), its slot, and whether it begins here."""

    first: int
    last: int
    row: int
    fresh: bool


def spans(
    num_tokens: int,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> list[Span]:
    """The requests of a step. Without the three tensors, all tokens are one fresh sequence.

    A padding request (context_len 0) is fresh too.
    """
    if query_start is None or context_len is None or request_row is None:
        return [Span(first=0, last=num_tokens, row=0, fresh=True)]
    starts = query_start.tolist()
    lengths, rows = context_len.tolist(), request_row.tolist()
    return [
        Span(first=a, last=b, row=row, fresh=length <= b - a)
        for a, b, length, row in zip(starts[:-1], starts[1:], lengths, rows, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each packed token goes in a padded layout with one row per request.

    request, column [T]: a token's row and its index in the row. If every request has one token
    (T == R, a decode step), it is computed without reading a value back from the device.
    """

    request: Tensor
    column: Tensor
    width: int
    fresh: Tensor  # [R] bool

    @staticmethod
    def of(num_tokens: int, query_start: Tensor, context_len: Tensor) -> Layout:
        requests = context_len.shape[0]
        count = query_start.diff()
        fresh = context_len <= count
        index = torch.arange(num_tokens, device=query_start.device)
        if num_tokens == requests:
            return Layout(request=index, column=torch.zeros_like(index), width=1, fresh=fresh)
        request = torch.searchsorted(query_start[1:].contiguous(), index, right=True)
        column = index - query_start[request]
        return Layout(request=request, column=column, width=int(count.max()), fresh=fresh)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, width, ...], padded with zeros."""
        if self.width == 1:
            return x[:, None]
        out = x.new_zeros(self.fresh.shape[0], self.width, *x.shape[1:])
        out[self.request, self.column] = x
        return out

    def pack(self, x: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return x[:, 0] if self.width == 1 else x[self.request, self.column]

    def start_state(self, state: Tensor, request_row: Tensor) -> Tensor:
        """The requests' initial states [R, ...]: those in their slots, zero for fresh ones."""
        shape = (-1, *[1] * (state.dim() - 1))
        return state[request_row].masked_fill(self.fresh.view(shape), 0)
