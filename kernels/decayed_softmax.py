"""`decayed_softmax`: a softmax over earlier tokens, per channel, with logits decaying by distance.

The time mixing of Peng et al., 2023, https://arxiv.org/abs/2305.13048, section 3.1.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl

_LOWEST = -1e38  # the largest logit before any token


def _step(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, state: Tensor) -> Tensor:
    """One token of each row, [..., C] in float32; updates `state` [..., 3, C]."""
    above, below, highest = state.unbind(-2)
    top = torch.maximum(highest, key + bonus)
    kept, own = torch.exp(highest - top), torch.exp(key + bonus - top)
    out = (kept * above + own * value) / (kept * below + own)
    top = torch.maximum(highest + decay, key)
    kept, own = torch.exp(highest + decay - top), torch.exp(key - top)
    state.copy_(torch.stack((kept * above + own * value, kept * below + own, top), -2))
    return out


@op(mutates=("state",), shape="value")
def decayed_softmax(
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """key, value [T, C], decay and bonus [C] -> [T, C] in value's dtype, computed in float32.

    out[t] is the mean of value[i], i <= t, weighted by exp(key[i] + (t - 1 - i) * decay) for
    earlier tokens and by exp(key[t] + bonus) for the token itself; decay is negative.
    state [slots, 3, C] float32 holds numerator, denominator and the largest logit, by which both
    are divided; tokens and slots as in `packed`. Without a state: one sequence that begins here.
    """
    out = torch.empty_like(value)
    fade, own = decay.float(), bonus.float()
    for s in spans(key.shape[0], query_start, context_len, request_row):
        memory = torch.zeros(3, key.shape[1], dtype=torch.float32, device=key.device)
        memory[2] = _LOWEST
        if state is not None and not s.fresh:
            memory = state[s.row].clone()
        for t in range(s.first, s.last):
            out[t] = _step(key[t].float(), value[t].float(), fade, own, memory).to(out.dtype)
        if state is not None:
            state[s.row] = memory
    return out


@torch_impl(decayed_softmax)
def _all_at_once(
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's state is unchanged."""
    layout = Layout.of(key.shape[0], query_start, context_len)
    keys, values = layout.pad(key.float()), layout.pad(value.float())
    has_token = layout.pad(torch.ones_like(key[:, :1], dtype=torch.bool))
    memory = state[request_row]
    empty = torch.zeros_like(memory)
    empty[:, 2] = _LOWEST
    memory = torch.where(layout.fresh[:, None, None], empty, memory)
    outs = []
    for t in range(layout.width):
        after = memory.clone()
        outs.append(_step(keys[:, t], values[:, t], decay.float(), bonus.float(), after))
        memory = torch.where(has_token[:, t, :, None], after, memory)
    state[request_row] = memory
    return layout.pack(torch.stack(outs, 1)).to(value.dtype)


def make_case(step: StateStep, gen: torch.Generator, dtype: torch.dtype, channels: int) -> Case:
    state = step.state((3, channels), gen, torch.float32)
    state[:, 1] = state[:, 1].abs() + 1  # a sum of weights
    return (
        torch.randn(step.num_tokens, channels, generator=gen).to(step.device, dtype),
        torch.randn(step.num_tokens, channels, generator=gen).to(step.device, dtype),
        -torch.rand(channels, generator=gen).to(step.device),
        torch.randn(channels, generator=gen).to(step.device),
        state,
        *step.inputs,
    )


@decayed_softmax.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for channels in (1, 37):
            yield make_case(step, gen, dtype, channels)
