"""`act_mul`: the gated activation of a feed-forward block, over a merged gate-and-up projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _shape(*, gate_up: Tensor, **others: object) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@op(shape=_shape)
def act_mul(gate_up: Tensor, act: str) -> Tensor:
    """gate_up [..., 2N] -> act(gate_up[..., :N]) * gate_up[..., N:], computed in float32.

    act: "silu", "gelu" or "gelu_tanh".
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[act](gate) * up).to(gate_up.dtype)


@act_mul.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for act in ACTIVATIONS:
        for shape in ((1, 1, 16), (3, 130), (1, 5, 1024)):
            yield torch.randn(*shape, generator=gen).to(device, dtype), act
