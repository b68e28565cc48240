"""`fused_linear`: a linear with the norm before it and the activation or residual sum after it.

The norm may have a gate, as `gated_rms_norm`, or be centered, as `layer_norm`. `add_linear` adds
the same to the residual in place; `norm_add_linear` reads a sum with another norm in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.act_mul import activated
from llmc.kernels.gated_rms_norm import gated_rms_norm
from llmc.kernels.layer_norm import layer_norm
from llmc.kernels.registry import Case, op
from llmc.kernels.rms_norm import norm_add, normalize


def _shape(
    *, x: Tensor, weight: Tensor, act: str | None, residual: Tensor | None, gated: bool,
    **others: object,
) -> Tensor:  # fmt: skip
    like = weight if residual is None else residual
    return like.new_empty(*x.shape[:-1], weight.shape[0] // (2 if act and gated else 1))


@op(shape=_shape)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    residual: Tensor | None,
    gate: Tensor | None = None,
    gate_act: str = "silu",
    gate_first: bool = False,
    group: int = 0,
    gated: bool = True,
    centered: bool = False,
    norm_bias: Tensor | None = None,
) -> Tensor:
    """act_mul(rms_norm(x) weight^T + bias) + residual; each part is optional.

    x [..., K], weight [N, K], bias [N]. eps None: no norm; otherwise norm_weight [K] and offset
    as in `rms_norm`. act as in `act_mul`: the result has N / 2 columns; if not gated, as in
    `activate`: it has N. residual: same shape as the result, which has its dtype: the weight's or
    float32. With a norm, x may be float32, too. With a gate [..., K], the norm is
    `gated_rms_norm`, of groups of `group` channels, with gate_act as its act; then x and gate may
    have other dtypes than the weight and the result. If centered, the norm is `layer_norm` with
    norm_bias [K], without a gate and an offset.
    """
    if gate is not None:
        assert eps is not None, "a gate belongs to a norm"
        x = gated_rms_norm.reference(
            x, gate, norm_weight, eps, offset, gate_act, gate_first, group, weight.dtype
        )
    elif eps is not None and centered:
        assert offset == 0, "a centered norm has no offset"
        x = layer_norm.reference(x, norm_weight, norm_bias, eps).to(weight.dtype)
    elif eps is not None:
        x = normalize(x, norm_weight, eps, offset).to(weight.dtype)
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if act is not None:
        y = activated(y, act, gated)
    if residual is None:
        return y.to(weight.dtype)
    return (y + residual.float()).to(residual.dtype)


@fused_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, dtype)

    for rows, k, n, normed, biased, act, added in (
        ((1,), 64, 48, True, True, None, False),
        ((1, 1), 100, 34, False, False, "gelu", False),
        ((1, 3), 72, 40, True, False, "silu", False),
        ((8,), 256, 64, False, True, None, True),
        ((1,), 2048, 32, True, True, None, True),
        ((5,), 520, 32, True, False, "gelu_tanh", True),
        ((20,), 64, 32, True, True, "silu", True),
        ((4, 5), 64, 32, True, False, None, True),
        ((9,), 100, 40, True, True, None, True),
        ((2, 8), 256, 64, True, False, "silu", True),
        # deep: one row of these is loaded ahead
        ((1,), 4096, 16, True, False, None, True),
        ((1,), 4100, 20, False, True, None, True),
        ((1,), 4112, 12, True, False, "silu", True),
    ):
        x, weight = rand(*rows, k), rand(n, k) * k**-0.5
        bias = rand(n) if biased else None
        eps, norm_weight = (1e-5, rand(k)) if normed else (None, None)
        residual = rand(*rows, n // (1 if act is None else 2)) if added else None
        offset = 1.0 if normed and k % 8 else 0.0
        yield x, weight, bias, norm_weight, eps, offset, act, residual
    for rows, k, n, normed, act, added in (
        ((1, 1), 100, 34, True, "relu2", False),
        ((3,), 72, 40, True, "gelu", True),
        ((20,), 64, 32, False, "gelu_tanh", True),
    ):
        x, weight = rand(*rows, k), rand(n, k) * k**-0.5
        eps, norm_weight = (1e-5, rand(k)) if normed else (None, None)
        ungated = (None, "silu", False, 0, False)
        residual = rand(*rows, n) if added else None
        yield x, weight, rand(n), norm_weight, eps, 0.0, act, residual, *ungated
    for rows, k, n, weighted, shifted, act, added in (
        ((1, 1), 100, 34, True, True, None, False),
        ((1,), 4112, 12, True, True, None, True),
        ((3,), 72, 40, True, False, "gelu", True),
        ((9,), 100, 40, False, False, "silu", True),
        ((2, 8), 256, 64, True, True, "gelu_tanh", False),
        ((20,), 64, 32, True, True, None, True),
    ):
        x, weight = rand(*rows, k) + 2, rand(n, k) * k**-0.5
        norm_weight, norm_bias = (rand(k) if given else None for given in (weighted, shifted))
        gated = act == "silu"
        residual = rand(*rows, n // 2 if gated else n) if added else None
        around = (norm_weight, 1e-5, 0.0, act, residual, None, "silu", False, 0, gated)
        yield x, weight, rand(n), *around, True, norm_bias
    for rows, groups, group, gate_act, first, weighted, added in (
        ((1, 1), 5, 16, "silu", False, True, True),
        ((1, 3), 3, 64, "sigmoid", False, False, True),
        ((1, 1), 1, 200, "silu", True, True, True),
        ((4,), 1, 96, "sigmoid", True, True, False),
        ((2, 2), 3, 320, "silu", True, True, True),
        ((1,), 2, 1088, "silu", True, False, False),
        ((3,), 2, 12, "silu", False, True, True),
        ((12,), 2, 16, "silu", False, True, True),
        ((16,), 1, 200, "sigmoid", True, True, True),
        ((17,), 2, 16, "silu", False, True, True),
    ):
        k = groups * group
        x, weight = rand(*rows, k), rand(32, k) * k**-0.5
        gate = rand(*rows, 2 * k)[..., k:]
        residual = rand(*rows, 32) if added else None
        norm_weight = rand(k) if weighted else None
        linear = (weight, None, norm_weight, 1e-5, float(first), None, residual)
        yield x.float() if first else x, *linear, gate, gate_act, first, group


@op(mutates=("out",))
def add_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    gate: Tensor | None = None,
    gate_act: str = "silu",
    gate_first: bool = False,
    group: int = 0,
    gated: bool = True,
    centered: bool = False,
    norm_bias: Tensor | None = None,
) -> None:
    """out += act_mul(rms_norm(x) weight^T + bias): `fused_linear`, with `out` as the residual.

    out [..., N], or [..., N / 2] with a gated act; it shares no memory with the other arguments.
    """
    given = (x, weight, bias, norm_weight, eps, offset, act, out)
    of_norm = (gate, gate_act, gate_first, group)
    out.copy_(fused_linear.reference(*given, *of_norm, gated, centered, norm_bias))


@add_linear.cases
def _adding_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, weight, bias, norm_weight, eps, offset, act, residual, *others in _cases(device, dtype):
        if residual is not None:
            given = (x, weight, bias, norm_weight, eps, offset, act, *others)
            yield residual, *given
            spread = residual.new_zeros(*residual.shape[:-1], residual.shape[-1] + 3)
            yield spread[..., :-3].copy_(residual), *given
            wide = x if eps is None else x.float()
            yield residual.float(), wide, *given[1:]


def _shapes(
    *, x: Tensor, weight: Tensor, act: str | None, gated: bool, **others: object
) -> tuple[Tensor, Tensor]:
    return _shape(x=x, weight=weight, act=act, residual=None, gated=gated), x.new_empty(x.shape)


@op(shape=_shapes)
def norm_add_linear(
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor | None,
    x_eps: float,
    x_offset: float,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    offset: float,
    act: str | None,
    gated: bool = True,
) -> tuple[Tensor, Tensor]:
    """(fused_linear of the sum, the sum): `norm_add` and the linear that reads it.

    x, residual [..., K], x_weight [K], all in the weight's dtype: the sum [..., K] is residual +
    rms_norm(x), with x_eps and x_offset. The other arguments as in `fused_linear`.
    """
    total = norm_add.reference(x, residual, x_weight, x_eps, x_offset)
    linear = (weight, bias, norm_weight, eps, offset, act, None)
    return fused_linear.reference(total, *linear, gated=gated), total


@norm_add_linear.cases
def _sum_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for x, weight, bias, norm_weight, eps, offset, act, residual, *others in _cases(device, dtype):
        if len(others) not in (0, 5):  # with a gate, or centered
            continue
        more = torch.full_like(x, 0.3) - x.flip(-1)
        gain = x.flatten(0, -2)[0].flip(0) / 2 if residual is None else None
        yield x, more, gain, 1e-5, offset, weight, bias, norm_weight, eps, offset, act, *others[4:]
