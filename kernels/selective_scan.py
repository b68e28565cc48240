"""`selective_scan`: a linear state-space recurrence whose step size depends on the token.

Gu and Dao, 2023, https://arxiv.org/abs/2312.00752 (a state per channel), and Dao and Gu, 2024,
https://arxiv.org/abs/2405.21060 (heads of channels that share a decay).
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
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """x [T, H, P], dt [T, H], a [H, N or 1], b and c [T, G, N] -> [T, H, P] in x's dtype.

    For every token: S = exp(dt * a) * S + dt * x b; out = S c; all in float32. Head h reads group
    h // (H / G) of b and c. state [slots, H, P, N] float32 is S between steps; tokens and slots as
    in `packed`. Without a state: one sequence that begins here.
    """
    out = torch.empty_like(x)
    heads, width = x.shape[1:]
    for s in spans(x.shape[0], query_start, context_len, request_row):
        memory = torch.zeros(heads, width, b.shape[2], dtype=torch.float32, device=x.device)
        if state is not None and not s.fresh:
            memory = state[s.row]
        for t in range(s.first, s.last):
            b_t, c_t = (m[t].float().repeat_interleave(heads // m.shape[1], 0) for m in (b, c))
            step = dt[t].float()[:, None]
            kept = memory * torch.exp(step * a.float())[:, None, :]
            memory = kept + (step * x[t].float())[:, :, None] * b_t[:, None, :]
            out[t] = (memory @ c_t[:, :, None])[:, :, 0].to(out.dtype)
        if state is not None:
            state[s.row] = memory
    return out


@torch_impl(selective_scan)
def _all_at_once(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's dt is zero."""
    layout = Layout.of(x.shape[0], query_start, context_len)
    heads = x.shape[1]
    x_p, dt_p, b_p, c_p = (layout.pad(m.float()) for m in (x, dt, b, c))
    b_p, c_p = (m.repeat_interleave(heads // m.shape[2], 2) for m in (b_p, c_p))
    kept = torch.exp(dt_p[..., None] * a.float())[:, :, :, None, :]  # [R, L, H, 1, N or 1]
    fed = dt_p[..., None] * x_p
    memory = layout.start_state(state, request_row)
    outs = []
    for t in range(layout.width):
        memory = torch.addcmul(memory * kept[:, t], fed[:, t, :, :, None], b_p[:, t, :, None, :])
        outs.append(torch.matmul(memory, c_p[:, t, :, :, None])[..., 0])
    state[request_row] = memory
    return layout.pack(torch.stack(outs, 1)).to(x.dtype)


def make_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    width: int,
    groups: int,
    size: int,
    per_state: bool,
) -> Case:
    tokens = step.num_tokens
    return (
        torch.randn(tokens, heads, width, generator=gen).to(step.device, dtype),
        torch.rand(tokens, heads, generator=gen).to(step.device),
        -torch.rand(heads, size if per_state else 1, generator=gen).to(step.device),
        torch.randn(tokens, groups, size, generator=gen).to(step.device, dtype),
        torch.randn(tokens, groups, size, generator=gen).to(step.device, dtype),
        step.state((heads, width, size), gen, torch.float32),
        *step.inputs,
    )


_SHAPES = ((6, 1, 1, 5, True), (4, 8, 2, 16, False), (3, 6, 3, 5, False))


@selective_scan.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for heads, width, groups, size, per_state in _SHAPES:
            yield make_case(step, gen, dtype, heads, width, groups, size, per_state)
