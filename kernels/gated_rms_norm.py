"""`gated_rms_norm`: a root-mean-square normalization before or after a gate.

Recurrent layers normalize what they read from their state: Dao and Gu, 2024,
https://arxiv.org/abs/2405.21060 (after the gate, groups of channels), and Yang, Kautz and
Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464 (before the gate, head by head).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import normalize

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _shape(*, x: Tensor, dtype: torch.dtype, **others: object) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@op(shape=_shape)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    act: str,
    gate_first: bool,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """x, gate [..., N], weight [N] -> [..., N] in `dtype`, computed in float32 and rounded once.

    Each group of `group` channels is normalized alone. act of gate ("silu" or "sigmoid") multiplies
    x before that if gate_first, otherwise the result. eps and offset as in `rms_norm`.
    """
    factor = GATES[act](gate.float())
    y = x.float() * factor if gate_first else x.float()
    y = normalize(y.unflatten(-1, (-1, group)), None, eps, 0.0).flatten(-2)
    y = y if weight is None else y * (weight.float() + offset)
    return (y if gate_first else y * factor).to(dtype).contiguous()


@gated_rms_norm.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    for shape, group, act, first in (
        ((1, 3, 2, 100), 100, "silu", False),
        ((1, 5, 96), 24, "silu", True),
        ((4, 17), 17, "sigmoid", False),
        ((2, 40), 20, "sigmoid", True),
    ):
        x, n = rand(*shape), shape[-1]
        gate = rand(*shape[:-1], 2 * n)[..., n:]
        yield x, gate, rand(n), 1e-5, 0.0, act, first, group, dtype
        yield x.float(), gate, None, 1e-6, 0.0, act, first, group, dtype
    yield x, gate, rand(n).float(), 1e-6, 1.0, act, first, group, torch.float32
