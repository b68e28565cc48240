"""`selective_scan`: a linear state-space recurrence whose step size depends on the token.

Gu and Dao, 2023, https://arxiv.org/abs/2312.00752 (a state per channel), and Dao and Gu, 2024,
https://arxiv.org/abs/2405.21060 (heads of channels that share a decay).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl


def _shape(*, x: Tensor, dtype: torch.dtype, **others: object) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@op(mutates=("state",), shape=_shape)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    dtype: torch.dtype,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """x [T, H, P], dt [T, H], a [H, N or 1], b and c [T, G, N] -> [T, H, P] in `dtype`.

    For every token: S = exp(dt * a) * S + dt * x b; out = S c; all in float32. Head h reads group
    h // (H / G) of b and c. First dt is dt + dt_bias [H], then, if dt_softplus, its softplus, then
    at least dt_min and at most dt_max. Last, skip [H] * x is added to out, and out is multiplied by
    silu(gate [T, H, P]).

    state [slots, H, P, N] float32 is S between steps; tokens and slots as in `packed`. Without a
    state: one sequence that begins here.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    heads, width = x.shape[1:]
    dt = _step_sizes(dt, dt_bias, dt_softplus, dt_min, dt_max)
    for s in spans(x.shape[0], query_start, context_len, request_row):
        memory = torch.zeros(heads, width, b.shape[2], dtype=torch.float32, device=x.device)
        if state is not None and not s.fresh:
            memory = state[s.row]
        for t in range(s.first, s.last):
            b_t, c_t = (m[t].float().repeat_interleave(heads // m.shape[1], 0) for m in (b, c))
            step = dt[t][:, None]
            kept = memory * torch.exp(step * a.float())[:, None, :]
            memory = kept + (step * x[t].float())[:, :, None] * b_t[:, None, :]
            out[t] = (memory @ c_t[:, :, None])[:, :, 0]
        if state is not None:
            state[s.row] = memory
    return _output(out, x, skip, gate, dtype)


def _step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, least: float, most: float
) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return (F.softplus(dt) if softplus else dt).clamp(least, most)


def _output(
    out: Tensor, x: Tensor, skip: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if skip is not None:
        out = out + skip.float()[:, None] * x.float()
    return (out if gate is None else out * F.silu(gate.float())).to(dtype)


@torch_impl(selective_scan)
def _all_at_once(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    dtype: torch.dtype,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's dt is zero."""
    layout = Layout.of(x.shape[0], query_start, context_len)
    heads = x.shape[1]
    dt = _step_sizes(dt, dt_bias, dt_softplus, dt_min, dt_max)
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
    return _output(layout.pack(torch.stack(outs, 1)), x, skip, gate, dtype)


def make_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    width: int,
    groups: int,
    size: int,
    per_state: bool,
    raw: bool = False,
) -> Case:
    """`raw`: with everything that a model computes before and after the recurrence."""
    tokens = step.num_tokens

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(step.device, dtype)

    return (
        rand(tokens, heads, width),
        rand(tokens, heads) if raw else rand(tokens, heads).float().sigmoid(),
        -torch.rand(heads, size if per_state else 1, generator=gen).to(step.device),
        rand(tokens, groups, size),
        rand(tokens, groups, size),
        rand(heads) if raw else None,
        rand(tokens, heads, 2 * width)[..., width:] if raw else None,
        rand(heads).float() if raw else None,
        raw,
        0.25 if raw else 0.0,
        1.5 if raw else float("inf"),
        torch.float32 if raw and width > 1 else dtype,
        step.state((heads, width, size), gen, torch.float32),
        *step.inputs,
    )


_SHAPES = (
    (6, 1, 1, 5, True, True),
    (4, 8, 2, 16, False, True),
    (6, 1, 1, 16, True, False),
    (3, 6, 3, 5, False, False),
)


@selective_scan.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for heads, width, groups, size, per_state, raw in _SHAPES:
            yield make_case(step, gen, dtype, heads, width, groups, size, per_state, raw)
