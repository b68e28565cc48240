"""Shared by the Triton ops with a state: a request's tokens, what is taken, what launches share.

A program owns a part of one request's state: it keeps that part in registers, goes through the
request's tokens, and writes it back. Grids depend on shapes only.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton.define import DTYPES, interpreted


@triton.jit
def span(query_start, context_len, request_row, request):
    """A request's tokens [first, last), its slot, and whether its state is to be read."""
    first = tl.load(query_start + request)
    last = tl.load(query_start + request + 1)
    slot = tl.load(request_row + request).to(tl.int64)
    return first, last, slot, tl.load(context_len + request) > last - first


def dense(x: Tensor) -> Tensor:
    """With a dense last dimension; a copy where `x` lies otherwise."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def step_args(query_start: Tensor, context_len: Tensor, request_row: Tensor) -> dict[str, Any]:
    return {"query_start": query_start, "context_len": context_len, "request_row": request_row}


def takes_slots(
    *,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
    **inputs: Tensor | None,
) -> bool:
    """With slots and the bounds of the requests, as a step gives them."""
    kind = "cpu" if interpreted() else "cuda"
    if state is None or query_start is None or context_len is None or request_row is None:
        return False
    return state.is_contiguous() and all(
        t.device.type == kind and t.dtype in DTYPES
        for t in (*inputs.values(), state)
        if t is not None
    )
