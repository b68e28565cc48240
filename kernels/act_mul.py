"""The activations of feed-forward blocks: `act_mul` with a gate, over a merged gate-and-up
projection, and `activate` without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op

QUICK = 1.702  # https://arxiv.org/abs/1606.08415
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activated(x: Tensor, act: str, gated: bool) -> Tensor:
    """act(x), or where gated act(first half) * second half of the last dimension."""
    if not gated:
        return ACTIVATIONS[act](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up


def _shape(*, gate_up: Tensor, **others: object) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@op(shape=_shape)
def act_mul(
    gate_up: Tensor,
    act: str,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """gate_up [..., 2N] -> act(gate) * (up + shift) [..., N], computed in float32.

    gate and up: the two halves of the last dimension; if interleaved, its even and its odd
    elements. limit: at most so large are gates, and the magnitudes of up. act: "silu", "gelu",
    "gelu_tanh", "quick_gelu", which is x sigmoid(1.702 x), "relu" or "relu2", which is its square.
    """
    x = gate_up.float()
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (ACTIVATIONS[act](gate) * (up + shift)).to(gate_up.dtype)


@op(shape="x")
def activate(x: Tensor, act: str) -> Tensor:
    """x [...] -> act(x) [...] in x's dtype, computed in float32; the activations of `act_mul`."""
    return ACTIVATIONS[act](x.float()).to(x.dtype).contiguous()


@activate.cases
def _activate_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for act in ACTIVATIONS:
        for shape in ((1, 1, 16), (3, 65), (1, 5, 1040)):
            yield (torch.randn(*shape, generator=gen) * 3).to(device, dtype), act


@act_mul.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for act in ACTIVATIONS:
        for shape in ((1, 1, 16), (3, 130), (1, 5, 1024)):
            yield torch.randn(*shape, generator=gen).to(device, dtype), act
    for shape in ((1, 1, 16), (3, 130), (1, 5, 2080)):
        x = torch.randn(*shape, generator=gen).to(device, dtype)
        yield x, "quick_gelu", 0.75, 1.0, True
        yield x, "silu", 0.5
