"""`causal_conv`: a short convolution over time, per channel, with its last inputs as state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.packed import Layout, spans
from llmc.kernels.registry import Case, op
from llmc.kernels.state_cases import StateStep, step_cases
from llmc.kernels.torch_impl import torch_impl

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu}


@op(mutates=("state",), shape="x")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str | None,
    x_gate: Tensor | None,
    y_gate: Tensor | None,
    state: Tensor | None,
    query_start: Tensor | None,
    context_len: Tensor | None,
    request_row: Tensor | None,
) -> Tensor:
    """x [T, C], weight [C, K], bias [C] -> [T, C]: y[t] = sum over j of w[j] * x[t - (K - 1) + j].

    act: None, or "silu" of y. x_gate, y_gate [T, C]: x, and y after its act, are multiplied by
    them. y is rounded once, and x times x_gate to x's dtype. state [slots, C, K - 1] holds the
    inputs before a request's tokens and is updated; tokens and slots as in `packed`. Without a
    state: one sequence that begins here.
    """
    out = torch.empty_like(x)
    channels, width = weight.shape
    x = _gated(x, x_gate)
    for s in spans(x.shape[0], query_start, context_len, request_row):
        tokens = x[s.first : s.last].T
        past = x.new_zeros(channels, width - 1)
        if state is not None and not s.fresh:
            past = state[s.row].to(x.dtype)
        inputs = torch.cat((past, tokens), dim=1)
        taps = (weight[:, None].float(), None if bias is None else bias.float())
        y = F.conv1d(inputs[None].float(), *taps, groups=channels)[0]
        y = (y if act is None else ACTS[act](y)).T
        out[s.first : s.last] = y if y_gate is None else y * y_gate[s.first : s.last].float()
        if state is not None:
            state[s.row] = inputs[:, inputs.shape[1] - (width - 1) :].to(state.dtype)
    return out


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else (x.float() * gate.float()).to(x.dtype)


@torch_impl(causal_conv)
def _all_at_once(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str | None,
    x_gate: Tensor | None,
    y_gate: Tensor | None,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    request_row: Tensor,
) -> Tensor:
    """Each tap is one gather for all tokens, from the packed inputs or from the slots."""
    taps = weight.shape[1] - 1
    x = _gated(x, x_gate)
    layout = Layout.of(x.shape[0], query_start, context_len)
    past = layout.start_state(state, request_row).to(x.dtype).transpose(1, 2)  # [R, K - 1, C]
    inputs = torch.cat((past, layout.pad(x)), dim=1)  # a request's inputs from tap 0 on
    y = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(x.shape)
    for j in range(taps + 1):
        tap = inputs[layout.request, layout.column + j]
        y = y + tap.float() * weight[:, j].float()
    last = query_start.diff().long()[:, None] + torch.arange(taps, device=x.device)
    row = torch.arange(last.shape[0], device=x.device)[:, None]
    state[request_row] = inputs[row, last].transpose(1, 2).to(state.dtype)
    y = y if act is None else ACTS[act](y)
    return (y if y_gate is None else y * y_gate.float()).to(x.dtype)


def make_case(
    step: StateStep,
    gen: torch.Generator,
    dtype: torch.dtype,
    channels: int,
    width: int,
    biased: bool,
    act: str | None,
    gated: bool = False,
) -> Case:
    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(step.device, dtype)

    x, x_gate, y_gate = rand(step.num_tokens, channels), None, None
    if gated:  # as in a model: parts of one projection
        x, x_gate, y_gate = rand(step.num_tokens, 3 * channels).chunk(3, dim=1)
    return (
        x,
        rand(channels, width),
        rand(channels) if biased else None,
        act,
        x_gate,
        y_gate,
        step.state((channels, width - 1), gen, dtype),
        *step.inputs,
    )


@causal_conv.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for step, gen in step_cases(device):
        for channels, width, biased, act in ((5, 4, True, None), (33, 2, False, "silu")):
            yield make_case(step, gen, dtype, channels, width, biased, act)
        yield make_case(step, gen, dtype, 40, 3, False, None, gated=True)
