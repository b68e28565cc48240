"""Helpers for the Triton ops with a state: token ranges, supported inputs, common launch arguments.

A program owns a part of one request's state: it keeps that part in registers, processes the
request's tokens, and writes it back. Grids depend only on shapes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton.define import DTYPES
from llmc.kernels.triton.launch import interpreted


@triton.jit
def span(query_start, context_len, request_row, request):
    """A request's tokens [first, last), its slot, and whether it continues from its state."""
    first = tl.load(query_start + request)
    last = tl.load(query_start + request + 1)
    slot = tl.load(request_row + request).to(tl.int64)
    return first, last, slot, tl.load(context_len + request) > last - first


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with small relative errors: log(1 + y) is log(u) y / (u - 1) for u = 1 + y
    as rounded (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.14.1)."""
    y = tl.exp(-tl.abs(x))
    u = 1 + y
    rest = tl.where(u == 1, y, tl.log(u) * (y / tl.where(u == 1, 1.0, u - 1)))
    return tl.maximum(x, 0.0) + rest


def dense(x: Tensor) -> Tensor:
    """`x` with a contiguous last dimension, copied if necessary."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def step_args(query_start: Tensor, context_len: Tensor, request_row: Tensor) -> dict[str, Any]:
    return {"query_start": query_start, "context_len": context_len, "request_row": request_row}


def takes_slots(
    *,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
    **inputs: Any,
) -> bool:
    """Whether the call has slots and request bounds, as in a step, and supported tensors."""
    kind = "cpu" if interpreted() else "cuda"
    if state is None or query_start is None or context_len is None or request_row is None:
        return False
    return state.is_contiguous() and all(
        t.device.type == kind and t.dtype in DTYPES
        for t in (*inputs.values(), state)
        if isinstance(t, Tensor)
    )
