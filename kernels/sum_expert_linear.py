"""`sum_expert_linear`: the last linear of routed experts, and the sum of each token's results.

`sum_quantized_expert_linear` is the same over quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from llmc.kernels.choose_experts import sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import CHANNELS, EXACT_BITS
from llmc.kernels.registry import Case, op


def _shape(
    *, x: Tensor, weight: Tensor, transposed: bool, share: Tensor, dtype: torch.dtype,
    **others: object,
) -> Tensor:  # fmt: skip
    return x.new_empty(share.shape[0], weight.shape[2 if transposed else 1], dtype=dtype)


@op(shape=_shape)
def sum_expert_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    transposed: bool,
    share: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """`sum_experts` with the weights share [T, C] and residual [T, N] of the `expert_linear` of
    expert [T C]: [T, N] in dtype. The experts' results are rounded to x's dtype before."""
    rows = expert_linear.reference(x, weight, bias, expert, transposed, order, offsets)
    total: Tensor = sum_experts.reference(rows, share, dtype, residual)
    return total


def _quantized_shape(
    *, x: Tensor, weight: Tensor, share: Tensor, dtype: torch.dtype, **others: object
) -> Tensor:
    return x.new_empty(share.shape[0], weight.shape[1] * CHANNELS, dtype=dtype)


@op(shape=_quantized_shape)
def sum_quantized_expert_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    expert: Tensor,
    share: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """As `sum_expert_linear`, of a `quantized_expert_linear`."""
    rows = quantized_expert_linear.reference(
        x, weight, scale, zero, bias, expert, minimum, x_bits, order, offsets
    )
    total: Tensor = sum_experts.reference(rows, share, dtype, residual)
    return total


def _sums(
    gen: torch.Generator, expert: Tensor, channels: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, torch.dtype, Tensor | None]]:
    """share, dtype and residual for the results of these experts."""
    rows, device = expert.shape[0], expert.device
    count = next(count for count in (5, 3, 2, 1) if rows % count == 0)
    share = torch.rand(rows // count, count, generator=gen).to(device)
    yield share, torch.float32, None
    residual = torch.randn(rows // count, channels, generator=gen).to(device, dtype)
    yield share.to(dtype), dtype, residual


def _ungated(of: Iterable[Case]) -> Iterator[Case]:
    return (case for case in of if not any(isinstance(value, str) for value in case))


@sum_expert_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for maker in expert_linear.case_makers:
        for x, weight, bias, expert, transposed in _ungated(maker(device, dtype)):
            channels = weight.shape[2 if transposed else 1]
            for sums in _sums(gen, expert, channels, dtype):
                yield x, weight, bias, expert, transposed, *sums


@sum_quantized_expert_linear.cases
def _quantized_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for maker in quantized_expert_linear.case_makers:
        for x, weight, scale, zero, bias, expert, *others in _ungated(maker(device, dtype)):
            for sums in _sums(gen, expert, weight.shape[1] * CHANNELS, dtype):
                yield x, weight, scale, zero, bias, expert, *sums, *others
