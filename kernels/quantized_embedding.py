"""`quantized_embedding`: look up rows of a weight stored in the blocks of `quantized_linear`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.quantized_linear import (
    CHANNELS,
    LINE,
    SUPERBLOCK_DRAWS,
    Format,
    Quantization,
    inputs_of,
    mxfp4_draw,
    numbers,
    quantization_of,
    superblock_draw,
)
from llmc.kernels.registry import Case, op
from llmc.kernels.torch_impl import torch_impl


def _shape(
    *, ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, **others: object
) -> Tensor:
    return scale.new_empty(*ids.shape, inputs_of(weight), dtype=dtype)


@op(shape=_shape)
def quantized_embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    minimum: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """ids [...] of rows -> those rows [..., K] in `dtype`, dequantized as in `quantized_linear`.

    weight, scale, zero and minimum: see there. A row is a channel, and 16 channels share a block,
    so a row is gathered four bytes at a time. An id outside [0, N) gives a row of zeros.
    """
    known = (ids >= 0) & (ids < weight.shape[0] * CHANNELS)
    ids = torch.where(known, ids, 0)
    block, lane = ids // CHANNELS, ids % CHANNELS

    def rows(blocks: Tensor, bytes: int = 1) -> Tensor:
        """[N / 16, n, 16 * width] -> [..., n * width], where `bytes` of a channel are adjacent."""
        found: Tensor = blocks.view(len(blocks), -1, CHANNELS, bytes)[block, :, lane]
        return found.flatten(-2)

    parts = (None if part is None else rows(part) for part in (zero, minimum))
    stored = rows(weight, LINE).unflatten(-1, (weight.shape[1], -1))
    values = numbers(stored, rows(scale), *parts)
    return torch.where(known[..., None], values, 0).to(dtype)


# The reference gathers all rows at once without reading values on the host, so it is fast enough.
torch_impl(quantized_embedding)(quantized_embedding.reference)


@quantized_embedding.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes = ("int8", 64, 48, 0), ("int8", 96, 32, 32), ("int4", 128, 32, 0), ("int4", 160, 48, 32)
    small = ("int8", 64, 32, 16), ("int4", 96, 48, 16)
    for name, k, n, group in (*shapes, *small, ("fp8", 96, 16, 0), ("fp8", 64, 64, 32)):
        format: Format = name  # type: ignore[assignment]
        to = Quantization(format=format, group=group) if group else quantization_of(format, n, k)
        assert to is not None
        codes = torch.randint(-128, 128, to.shape("weight", n, k), generator=gen, dtype=torch.int8)
        weight = codes.view(to.dtype).to(device)  # every code, including NaN for fp8
        scale = torch.randn(to.shape("scale", n, k), generator=gen)
        scale[0, 0, 3] = float("nan")
        ids = torch.randint(0, n, (1, 7), generator=gen)
        ids[0, :4] = torch.tensor([3, n - 1, -1, n])  # invalid rows give zeros
        zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8)
        minimum = torch.randn(scale.shape, generator=gen)
        kinds = {"int8": ((None, minimum),), "int4": ((zero, None), (None, minimum)), "fp8": ()}
        for parts in ((None, None), *kinds[format]):
            on_device = (None if part is None else part.to(device) for part in parts)
            wide = scale if parts[1] is not None else scale.to(to.scale_dtype)
            yield ids.to(device), weight, wide.to(device), *on_device, dtype
    codes, exponents = mxfp4_draw(gen, 48, 96)
    exponents[0, 0, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    yield ids.to(device) % 48, codes.to(device), exponents.to(device), None, None, dtype
    yield (
        torch.zeros(0, dtype=torch.int64, device=device),
        weight,
        scale.to(device),
        None,
        None,
        dtype,
    )
    for format, group, least, k in SUPERBLOCK_DRAWS:
        weight, scale = superblock_draw(gen, format, group, least, 32, k)
        yield ids.to(device) % 34, weight.to(device), scale.to(device), None, None, dtype
