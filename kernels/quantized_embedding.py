"""`quantized_embedding`: rows of a weight that is held in the blocks of `quantized_linear`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.quantized_linear import CHANNELS, numbers, quantization_of, quantize
from llmc.kernels.registry import Case, op
from llmc.kernels.torch_impl import torch_impl


def _shape(
    *, ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, **others: object
) -> Tensor:
    depth = weight.shape[1] * (8 if weight.dtype == torch.uint8 else 4)
    return scale.new_empty(*ids.shape, depth, dtype=dtype)


@op(shape=_shape)
def quantized_embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    minimum: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """ids [...] of rows -> those rows [..., K] in `dtype`, as `quantized_linear` means them.

    weight, scale, zero and minimum: see there. A row is a channel, of which 16 share a block, so
    it is gathered four bytes at a time.
    """
    block, lane = ids // CHANNELS, ids % CHANNELS

    def rows(blocks: Tensor) -> Tensor:
        """[N / 16, lines, 16 * width] -> [..., lines * width]"""
        found: Tensor = blocks.unflatten(2, (CHANNELS, -1))[block, :, lane]
        return found.flatten(-2)

    parts = (None if part is None else rows(part) for part in (zero, minimum))
    return numbers(rows(weight), rows(scale), *parts).to(dtype)


# The reference gathers all rows at once and reads nothing on the host: it serves as it is.
torch_impl(quantized_embedding)(quantized_embedding.reference)


@quantized_embedding.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    for format, k, n in (("int8", 64, 48), ("int4", 128, 32), ("fp8", 96, 16)):
        to = quantization_of(format, n, k)  # type: ignore[arg-type]
        assert to is not None
        weight, scale = quantize(torch.randn(n, k, generator=gen), to)
        minimum = None if format == "fp8" else torch.randn(scale.shape, generator=gen).to(device)
        ids = torch.randint(0, n, (1, 7), generator=gen).to(device)
        for least in (None, minimum):
            yield ids, weight.to(device), scale.to(device), None, least, dtype
