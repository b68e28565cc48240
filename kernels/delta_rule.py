"""`delta_rule`: linear attention with the delta rule, and a decay per head or per channel.

Gated delta networks: Yang, Kautz and Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464. With a
decay per channel: Zhang et al., 2025, https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl


@op(mutates=("state",), shape="value")
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """query, key [T, H, D], value [T, H, Dv], beta [T, H] -> [T, H, Dv] in value's dtype.

    decay [T, H, D or 1] is a logarithm. For every token: S = exp(decay) * S;
    S = S + key (beta * (value - key S)); out = query S; all in float32. state [slots, H, D, Dv]
    float32 is S between steps; tokens and slots as in `packed`. Without a state: one sequence
    that begins here. The caller normalizes and scales query and key.
    """
    out = torch.empty_like(value)
    shape = (*key.shape[1:], value.shape[2])
    for s in spans(key.shape[0], query_start, context_len, request_row):
        memory = torch.zeros(shape, dtype=torch.float32, device=key.device)
        if state is not None and not s.fresh:
            memory = state[s.row]
        for t in range(s.first, s.last):
            k, v, q = key[t].float(), value[t].float(), query[t].float()
            memory = memory * decay[t].float().exp()[:, :, None]
            known = torch.einsum("hd,hdv->hv", k, memory)
            correction = (v - known) * beta[t].float()[:, None]
            memory = memory + k[:, :, None] * correction[:, None, :]
            out[t] = torch.einsum("hd,hdv->hv", q, memory).to(out.dtype)
        if state is not None:
            state[s.row] = memory
    return out


@torch_impl(delta_rule)
def _all_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's beta and decay are 0."""
    layout = Layout.of(key.shape[0], query_start, context_len)
    q, k, v, g, b = (layout.pad(x.float()) for x in (query, key, value, decay, beta))
    memory = layout.start_state(state, request_row)
    g, b = g.exp()[..., None], b[..., None]
    outs = []
    for t in range(layout.width):
        memory = memory * g[:, t]
        known = torch.matmul(k[:, t, :, None], memory)[:, :, 0]
        correction = (v[:, t] - known) * b[:, t]
        memory = torch.addcmul(memory, k[:, t, :, :, None], correction[:, :, None])
        outs.append(torch.matmul(q[:, t, :, None], memory)[:, :, 0])
    state[request_row] = memory
    return layout.pack(torch.stack(outs, 1)).to(value.dtype)


def make_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    v_dim: int,
    per_channel: bool,
) -> Case:
    tokens = step.num_tokens
    key = torch.randn(tokens, heads, dim, generator=gen)
    return (
        torch.randn(tokens, heads, dim, generator=gen).to(step.device, dtype),
        (key / key.norm(dim=-1, keepdim=True)).to(step.device, dtype),
        torch.randn(tokens, heads, v_dim, generator=gen).to(step.device, dtype),
        -torch.rand(tokens, heads, dim if per_channel else 1, generator=gen).to(step.device),
        torch.rand(tokens, heads, generator=gen).to(step.device, dtype),
        step.state((heads, dim, v_dim), gen, torch.float32),
        *step.inputs,
    )


@delta_rule.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for heads, dim, v_dim, per_channel in ((1, 4, 6, False), (3, 16, 8, True)):
            yield make_case(step, gen, dtype, heads, dim, v_dim, per_channel)
