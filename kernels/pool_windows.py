"""`pool_windows`: compress every few tokens to one entry, by a softmax per channel over them.

Compressed attention (2026) attends to these entries instead of older tokens. A running softmax
needs the highest logit so far, the sum of weights and the weighted sum of values: these are the
state, and no tokens are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl

_LOWEST = -1e38  # the highest logit before any token


def _shape(*, value: Tensor, bias: Tensor, series: int, **others: object) -> Tensor:
    return value.new_empty(value.shape[0], bias.shape[1] // series)


@op(mutates=("state",), shape=_shape)
def pool_windows(
    value: Tensor,
    gate: Tensor,
    bias: Tensor,
    series: int,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """value, gate [T, series * D] and bias [W, series * D] -> [T, D] in value's dtype.

    Every W tokens of a request, from position 0 on, form a window. The last token of a window gets
    its entry, other tokens get zeros: sum over j of softmax(gate[j] + bias[j]) * value[j], in
    float32, per channel. With one series, j runs over the W tokens of the window. With two, it runs
    over the previous window's tokens, with their first D channels, and this window's tokens, with
    their other channels; the first window has no previous one.

    state [slots, 2 * series - 1, 3, D] float32: the highest logit, the sum of weights and the
    weighted sum of each unfinished softmax (the first D channels of the previous window, then those
    of this one, then the other channels). Tokens and slots as in `packed`. Without a state: one
    sequence that begins here.
    """
    width, dim = bias.shape[0], bias.shape[1] // series
    out = value.new_zeros(value.shape[0], dim)
    none = torch.tensor([_LOWEST, 0.0, 0.0], device=value.device)[:, None].expand(3, dim)
    lengths = [] if context_len is None else context_len.tolist()
    for r, s in enumerate(spans(value.shape[0], query_start, context_len, request_row)):
        sums = [none] * (2 * series - 1)
        place = 0
        if state is not None and not s.fresh:
            sums, place = list(state[s.row]), lengths[r] - (s.last - s.first)
        for t in range(s.first, s.last):
            j = place % width
            if j == 0:
                sums = [sums[1], none, none] if series == 2 else [none]
            logits = (gate[t].float() + bias[j].float()).view(series, dim)
            for i, logit in enumerate(logits):
                at = len(sums) - series + i
                sums[at] = _with(sums[at], logit, value[t].float().view(series, dim)[i])
            if j == width - 1:
                out[t] = _pooled(sums[0], sums[-1]).to(out.dtype)
            place += 1
        if state is not None:
            state[s.row] = torch.stack(sums)
    return out


def _with(sums: Tensor, logit: Tensor, value: Tensor) -> Tensor:
    """The sums [..., 3, D] of a softmax after adding one logit and value [..., D]."""
    highest, below, above = sums.unbind(-2)
    top = torch.maximum(highest, logit)
    kept, own = torch.exp(highest - top), torch.exp(logit - top)
    return torch.stack((top, kept * below + own, kept * above + own * value), -2)


def _pooled(one: Tensor, other: Tensor) -> Tensor:
    """The result [..., D] of a softmax over two parts; the same part twice counts like once."""
    parts = torch.stack((one, other))
    weights = torch.exp(parts[..., 0, :] - parts[..., 0, :].amax(0))
    return (weights * parts[..., 2, :]).sum(0) / (weights * parts[..., 1, :]).sum(0)


@torch_impl(pool_windows)
def _all_at_once(
    value: Tensor,
    gate: Tensor,
    bias: Tensor,
    series: int,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """One token of all requests at a time; without a token, a request's state is unchanged."""
    layout = Layout.of(value.shape[0], query_start, context_len)
    width, dim = bias.shape[0], bias.shape[1] // series
    first = (context_len - query_start.diff()).clamp(min=0)  # 0 for padding too
    place = (first[:, None] + torch.arange(layout.width, device=value.device)) % width
    values = layout.pad(value.float()).unflatten(-1, (series, dim))
    logits = (layout.pad(gate.float()) + bias.float()[place]).unflatten(-1, (series, dim))
    has_token = layout.pad(torch.ones_like(value[:, :1], dtype=torch.bool))
    memory = state[request_row]
    none = torch.zeros_like(memory)
    none[:, :, 0] = _LOWEST
    memory = torch.where(layout.fresh[:, None, None, None], none, memory)
    outs = []
    for t in range(layout.width):
        begun = torch.cat((memory[:, 1:2], none[:, 1:]), 1) if series == 2 else none
        after = torch.where((place[:, t] == 0)[:, None, None, None], begun, memory)
        own = _with(after[:, -series:], logits[:, t], values[:, t])
        after = torch.cat((after[:, :-series], own), 1)
        entry = _pooled(after[:, 0], after[:, -1])
        outs.append(torch.where((place[:, t] == width - 1)[:, None], entry, 0.0))
        memory = torch.where(has_token[:, t, :, None, None], after, memory)
    state[request_row] = memory
    return layout.pack(torch.stack(outs, 1)).to(value.dtype)


def make_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    dim: int,
    width: int,
    series: int,
) -> Case:
    """Random inputs; states are those of unfinished windows."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(step.device, dtype)

    state = step.state((2 * series - 1, 3, dim), gen, torch.float32)
    state[:, :, 1] = state[:, :, 1].abs() + 0.5  # a sum of weights
    return (
        rand(step.num_tokens, series * dim),
        rand(step.num_tokens, series * dim),
        torch.randn(width, series * dim, generator=gen).to(step.device),
        series,
        state,
        *step.inputs,
    )


@pool_windows.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for dim, width, series in ((5, 4, 2), (33, 3, 1), (16, 8, 2)):
            yield make_case(step, gen, dtype, dim, width, series)
