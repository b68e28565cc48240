"""`delta_rule`: linear attention with the delta rule, and a decay per head or per channel.

Gated delta networks: Yang, Kautz and Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464. With a
decay per channel: Zhang et al., 2025, https://arxiv.org/abs/2510.26692.
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


@op(mutates=("state",), shape="value")
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    norm_eps: float | None,
    decay_rate: Tensor | None,
    decay_bias: Tensor | None,
    beta_scale: float | None,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """query, key [T, G, D], value [T, H, Dv], beta [T, H] -> [T, H, Dv] in value's dtype.

    Head h reads group h // (H / G) of query and key. decay [T, H, D or 1] is a logarithm. For every
    token: S = exp(decay) * S; S = S + key (beta * (value - key S)); out = query S; all in float32.

    First, in float32: with norm_eps, query and key are divided by sqrt(sum(x^2) + norm_eps); query
    is multiplied by scale. With decay_rate [H] and decay_bias [H, D or 1], decay is
    decay_rate * softplus(decay + decay_bias). With beta_scale, beta is beta_scale * sigmoid(beta).

    state [slots, H, D, Dv] float32 is S between steps; tokens and slots as in `packed`. Without a
    state: one sequence that begins here.
    """
    query, key, decay, beta = _inputs(
        query, key, decay, beta, value.shape[1],
        scale, norm_eps, decay_rate, decay_bias, beta_scale,
    )  # fmt: skip
    out = torch.empty_like(value)
    shape = (*key.shape[1:], value.shape[2])
    for s in spans(key.shape[0], query_start, context_len, request_row):
        memory = torch.zeros(shape, dtype=torch.float32, device=key.device)
        if state is not None and not s.fresh:
            memory = state[s.row]
        for t in range(s.first, s.last):
            k, v, q = key[t], value[t].float(), query[t]
            memory = memory * decay[t].exp()[:, :, None]
            known = torch.einsum("hd,hdv->hv", k, memory)
            correction = (v - known) * beta[t][:, None]
            memory = memory + k[:, :, None] * correction[:, None, :]
            out[t] = torch.einsum("hd,hdv->hv", q, memory).to(out.dtype)
        if state is not None:
            state[s.row] = memory
    return out


def _inputs(
    query: Tensor, key: Tensor, decay: Tensor, beta: Tensor, heads: int,
    scale: float, norm_eps: float | None, decay_rate: Tensor | None, decay_bias: Tensor | None,
    beta_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Query and key [T, H, D], decay and beta as the recurrence takes them, in float32."""
    q, k, decay, beta = (x.float() for x in (query, key, decay, beta))
    if norm_eps is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + norm_eps) for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q * scale, k))
    if decay_rate is not None and decay_bias is not None:
        decay = decay_rate.float()[:, None] * F.softplus(decay + decay_bias.float())
    return q, k, decay, beta if beta_scale is None else beta_scale * beta.sigmoid()


@torch_impl(delta_rule)
def _all_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    norm_eps: float | None,
    decay_rate: Tensor | None,
    decay_bias: Tensor | None,
    beta_scale: float | None,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's beta and decay are 0."""
    layout = Layout.of(key.shape[0], query_start, context_len)
    inputs = _inputs(
        query, key, decay, beta, value.shape[1],
        scale, norm_eps, decay_rate, decay_bias, beta_scale,
    )  # fmt: skip
    q, k, g, b, v = (layout.pad(x) for x in (*inputs, value.float()))
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
    group: int = 1,
    raw: bool = False,
) -> Case:
    """`group` heads share a query and key. `raw`: before their normalization and activations."""
    tokens, decays = step.num_tokens, dim if per_channel else 1

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    query, key = rand(tokens, heads // group, dim), rand(tokens, heads // group, dim)
    decay, beta = rand(tokens, heads, decays), rand(tokens, heads)
    if not raw:
        key = key / key.norm(dim=-1, keepdim=True)
        decay, beta = -decay.sigmoid(), beta.sigmoid()
    return (
        query.to(step.device, dtype),
        key.to(step.device, dtype),
        rand(tokens, heads, v_dim).to(step.device, dtype),
        decay.to(step.device, dtype if raw else torch.float32),
        beta.to(step.device, dtype),
        dim**-0.5 if raw else 1.0,
        1e-6 if raw else None,
        -rand(heads).exp().to(step.device) if raw else None,
        rand(heads, decays).to(step.device, dtype) if raw else None,
        2.0 if raw else None,
        step.state((heads, dim, v_dim), gen, torch.float32),
        *step.inputs,
    )


_SHAPES = ((1, 4, 6, False, 1), (3, 16, 8, True, 1), (4, 16, 8, False, 2), (2, 5, 6, True, 2))


@delta_rule.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for heads, dim, v_dim, per_channel, group in _SHAPES:
            yield make_case(step, gen, dtype, heads, dim, v_dim, per_channel, group, raw=group > 1)
