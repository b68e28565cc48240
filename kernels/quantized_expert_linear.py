"""`quantized_expert_linear`: routed experts with weights of 4 to 8 bits, in the format of
`quantized_linear`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.act_mul import act_mul
from llmc.kernels.expert_linear import choices_of
from llmc.kernels.quantized_linear import (
    CHANNELS,
    EXACT_BITS,
    SUPERBLOCK_DRAWS,
    Format,
    Quantization,
    mxfp4_draw,
    quantization_of,
    quantize,
    quantized_linear,
    superblock_draw,
)
from llmc.kernels.registry import Case, op


def _shape(
    *, x: Tensor, weight: Tensor, expert: Tensor, act: str | None, **others: object
) -> Tensor:
    channels = weight.shape[1] * CHANNELS
    return x.new_empty(expert.shape[0], channels // (1 if act is None else 2))


@op(shape=_shape)
def quantized_expert_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    expert: Tensor,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    act: str | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """x [T, K], expert [S] -> x[s // C] w[expert[s]]^T + bias[expert[s]], [S, N] in x's dtype.

    C = S / T, order, offsets, act, limit, shift and interleaved: as in `expert_linear`. weight
    [E, N / 16, lines, 64], scale, zero and minimum [E, N / 16, K / group, 16], bias [E, N] and
    x_bits: as in `quantized_linear`, for each expert. Results of one expert are computed together,
    so that each weight is read at most once. An expert outside [0, E) gives a row of zeros.
    """
    x = choices_of(x, expert)
    out = x.new_zeros(x.shape[0], weight.shape[1] * CHANNELS)
    for e in expert.unique().tolist():
        if not 0 <= e < weight.shape[0]:
            continue
        own = [None if part is None else part[e] for part in (zero, bias, minimum)]
        rows = (expert == e).nonzero()[:, 0]
        out[rows] = quantized_linear.reference(x[rows], weight[e], scale[e], *own, x_bits)
    return out if act is None else act_mul.reference(out, act, limit, shift, interleaved)


@quantized_expert_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes: tuple[tuple[int, int, int, int, int, Format, int], ...] = (
        (1, 1, 4, 16, 32, "int4", 0),
        (13, 1, 8, 48, 96, "int4", 0),
        (40, 4, 3, 32, 64, "int8", 0),
        (9, 1, 5, 48, 160, "fp8", 0),
        (20, 2, 3, 48, 256, "fp8", 128),
        (2, 1, 4, 32, 64, "mxfp4", 0),
        (60, 3, 3, 48, 96, "mxfp4", 0),
    )
    for rows, choices, experts, n, k, format, group in shapes:
        to = quantization_of(format, n, k)
        if group:
            to = Quantization(format=format, group=group)
        if format == "mxfp4":
            weight, scale = mxfp4_draw(gen, experts, n, k)
        else:
            assert to is not None
            drawn = torch.randn(experts * n, k, generator=gen) * k**-0.5
            weight, scale = (
                part.unflatten(0, (experts, -1)).contiguous() for part in quantize(drawn, to)
            )
        zero = minimum = None
        if format == "int4" and rows > 1:
            zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8).to(device)
        elif format in ("int4", "int8"):
            spread = torch.randn(scale.shape, generator=gen)
            minimum = ((spread - (7.5 if format == "int4" else 0.0)) * scale.float()).to(device)
        bias = torch.randn(experts, n, generator=gen).to(device, dtype) if n == 48 else None
        x = torch.randn(rows // choices, k, generator=gen).to(device, dtype)
        expert = torch.randint(-1, experts, (rows,), generator=gen).to(device)
        given = x, weight.to(device), scale.to(device), zero, bias, expert, minimum
        yield given
        bits = 16 if format == "int8" else 8
        if format != "mxfp4":
            yield *given, bits
        if n == 48:  # the errors of two sums multiply: smaller sums
            exact = 8 if format == "fp8" else EXACT_BITS
            yield x / 4, *given[1:], exact, None, None, "silu"
            yield x / 4, *given[1:], exact, None, None, "quick_gelu", 0.75, 1.0, True
    for format, group, least, k in SUPERBLOCK_DRAWS:
        weight, scale = superblock_draw(gen, format, group, least, 4, 32, k)
        x = torch.randn(10, k, generator=gen).to(device, dtype)
        expert = torch.randint(-1, 4, (20,), generator=gen).to(device)
        yield x, weight.to(device), scale.to(device), None, None, expert
