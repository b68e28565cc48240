"""`linear_recurrence`: a decayed sum over time, per channel.

The recurrence of the real-gated linear recurrent unit: De et al., 2024,
https://arxiv.org/abs/2402.19427.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl


@op(mutates=("state",), shape="x")
def linear_recurrence(
    x: Tensor,
    decay: Tensor,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """x, decay [T, C] -> [T, C] in x's dtype: h = decay * h + x for every token, in float32.

    state [slots, C] float32 is h between steps; tokens and slots as in `packed`. Without a state:
    one sequence that begins here.
    """
    out = torch.empty_like(x)
    for s in spans(x.shape[0], query_start, context_len, request_row):
        h = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        if state is not None and not s.fresh:
            h = state[s.row]
        for t in range(s.first, s.last):
            h = decay[t].float() * h + x[t].float()
            out[t] = h.to(out.dtype)
        if state is not None:
            state[s.row] = h
    return out


@torch_impl(linear_recurrence)
def _all_at_once(
    x: Tensor,
    decay: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's state does not decay."""
    layout = Layout.of(x.shape[0], query_start, context_len)
    x_p, kept = layout.pad(x.float()), layout.pad(decay.float() - 1) + 1
    h = layout.start_state(state, request_row)
    outs = []
    for t in range(layout.width):
        h = torch.addcmul(x_p[:, t], kept[:, t], h)
        outs.append(h)
    state[request_row] = h
    return layout.pack(torch.stack(outs, 1)).to(x.dtype)


def make_case(step: StateStep, gen: torch.Generator, dtype: torch.dtype, channels: int) -> Case:
    return (
        torch.randn(step.num_tokens, channels, generator=gen).to(step.device, dtype),
        torch.rand(step.num_tokens, channels, generator=gen).to(step.device),
        step.state((channels,), gen, torch.float32),
        *step.inputs,
    )


@linear_recurrence.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for channels in (1, 37):
            yield make_case(step, gen, dtype, channels)
