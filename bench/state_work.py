"""The stateful ops timed by bench.kernels, at the shapes of served models.

A decode step is bound by reading and writing the state. Calls rotate through more slots than any
cache can hold, as the layers of a model do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernel_work import CPU, DTYPES, InTurn, Work, fast
from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.registry import Case, Op
from llmc.kernels.selective_scan import selective_scan

_COLD_BYTES = 256e6


def state_work(name: str, rows: int, tokens: int, device: torch.device = CPU) -> Iterator[Work]:
    """A step of `rows` requests with `tokens` each, for every op."""
    dtype, total = DTYPES[name], rows * tokens
    rand = partial(torch.randn, dtype=dtype, device=device)

    def gate(*shape: int) -> Tensor:
        return torch.rand(shape, device=device)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1)

    make = partial(_work, name=name, rows=rows, tokens=tokens)
    yield make(
        delta_rule, "32 x 128 x 128", (32, 128, 128), torch.float32,
        (unit(total, 32, 128), unit(total, 32, 128), rand(total, 32, 128), -gate(total, 32, 1),
         gate(total, 32), 1.0, None, None, None, None),
    )  # fmt: skip
    for heads, width, size in ((5120, 1, 16), (80, 64, 128)):
        yield make(
            selective_scan, f"{heads} x {width} x {size}", (heads, width, size), torch.float32,
            (rand(total, heads, width).float(), gate(total, heads),
             -gate(heads, size if width == 1 else 1), rand(total, 1, size), rand(total, 1, size),
             None, None, None, False, -math.inf, math.inf, torch.float32),
        )  # fmt: skip
    yield make(
        linear_recurrence, "4096", (4096,), torch.float32,
        (rand(total, 4096).float(), gate(total, 4096)),
    )  # fmt: skip
    yield make(
        causal_conv, "8192 x 4", (8192, 3), dtype,
        (rand(total, 8192), rand(8192, 4), None, None, None, None),
    )  # fmt: skip


def _work(
    op: Op,
    shape: str,
    slot: tuple[int, ...],
    state_dtype: torch.dtype,
    inputs: tuple[Any, ...],
    *,
    name: str,
    rows: int,
    tokens: int,
) -> Work:
    device = inputs[0].device
    state = torch.zeros(rows, *slot, dtype=state_dtype, device=device)
    turns = max(1, int(_COLD_BYTES // state.nbytes)) if tokens == 1 else 1
    state = state.repeat(turns, *[1] * len(slot))
    start = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
    length = torch.full((rows,), 2 * tokens, dtype=torch.int32, device=device)
    order = torch.arange(rows * turns, device=device).view(turns, rows)
    cases = [(*inputs, state, start, length, row) for row in order]
    given = sum(x.nbytes for x in inputs if isinstance(x, Tensor))
    return Work(
        op=op.name,
        case=f"{'decode' if tokens == 1 else f'prefill {tokens}'}, {rows} x {shape}, {name}",
        run=InTurn([fast(op.name, case) for case in cases]),
        peers={"torch version": InTurn([_by_torch(op, case) for case in cases])},
        num_bytes=2.0 * state.nbytes / turns + given + inputs[0].nbytes,
        device=device,
    )


def _by_torch(op: Op, case: Case) -> Callable[[], Any]:
    (impl,) = [i for i in op.impls if i.name == "torch"]
    return partial(impl.op(), *case)
