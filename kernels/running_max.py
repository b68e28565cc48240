"""`running_max`: the running maximum per channel, for max pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import step_cases
from llmc.kernels.torch_impl import torch_impl


@op(mutates=("state",), shape="x")
def running_max(
    x: Tensor,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """x [T, C] float32 -> [T, C]: h = max(h, x) for every token; NaN propagates.

    state [slots, C] float32 is h between steps; tokens and slots as in `packed`. Without a state:
    one sequence that begins here.
    """
    out = torch.empty_like(x)
    for s in spans(x.shape[0], query_start, context_len, request_row):
        h = torch.full_like(x[0], -math.inf) if state is None or s.fresh else state[s.row]
        for t in range(s.first, s.last):
            out[t] = h = torch.maximum(h, x[t])
        if state is not None:
            state[s.row] = h
    return out


@torch_impl(running_max)
def _all_at_once(
    x: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """All requests at once; a request's padding comes after its tokens, so it has no effect."""
    layout = Layout.of(x.shape[0], query_start, context_len)
    h = state[request_row].masked_fill(layout.fresh[:, None], -math.inf)
    out = layout.pack(torch.maximum(layout.pad(x).cummax(1).values, h[:, None]))
    state[request_row] = out[query_start[1:] - 1]
    return out


@running_max.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for channels in (1, 37):
            x = torch.randn(step.num_tokens, channels, generator=gen).to(device)
            yield (x, step.state((channels,), gen, torch.float32), *step.inputs)
