"""Checks that the tensors of a quantized weight match: CheckpointError with both shapes if not."""

from __future__ import annotations

import math

import torch

from llmc.errors import CheckpointError
from llmc.weights.checkpoint import StoredTensor
from llmc.weights.quantized.quantized_tensor import BYTE_SCALES, grid_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


def block_of(scale: StoredTensor, channels: int, depth: int) -> tuple[int, int]:
    """The block if config.json does not state it: all of the weight, or of a channel or input, or
    inputs of a channel in equal groups."""
    sizes = scale.shape if len(scale.shape) != 1 else (*scale.shape, 1)
    rows, columns = sizes[-2:] if len(sizes) > 1 else (1, 1)
    fits = rows in (1, channels) and columns > 0 and depth % columns == 0
    if not fits or (rows == 1 and columns not in (1, depth)):
        raise CheckpointError(
            f"{scale.name} has shape {list(scale.shape)}; its weight of {channels} channels and "
            f"{depth} inputs requires one scale, or one per channel or group of its inputs"
        )
    return channels // rows, depth // columns


def check_scale(
    scale: StoredTensor,
    weight: StoredTensor,
    block: tuple[int, int],
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, *BYTE_SCALES),
    shape: tuple[int, int] | None = None,
) -> None:
    channels, depth = shape or weight.shape[-2:]
    grid = grid_of(channels, depth, block)
    want = grid if shape else (*weight.shape[:-2], *grid)
    fits = {want, want[:-1] if want[-1] == 1 else want}
    if math.prod(want) == 1:
        fits |= {(), (1,)}
    if scale.shape not in fits:
        raise CheckpointError(
            f"{scale.name} has shape {list(scale.shape)}; its weight of {channels} channels and "
            f"{depth} inputs with a scale for every {block[0]} by {block[1]} requires {list(want)}"
        )
    _check_dtype(scale, dtypes)


def check_shape(tensor: StoredTensor, want: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if tensor.shape != want:
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}; its weight requires {list(want)}"
        )
    _check_dtype(tensor, dtypes)


def check_kind(tensor: StoredTensor, dims: int, dtype: torch.dtype) -> None:
    if len(tensor.shape) != dims:
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)} instead of {dims} dimensions"
        )
    _check_dtype(tensor, (dtype,))


def _check_dtype(tensor: StoredTensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if dtypes and tensor.dtype not in dtypes:
        names = " or ".join(plain_name(d) for d in dtypes)
        raise CheckpointError(f"{tensor.name} is {plain_name(tensor.dtype)} instead of {names}")


def plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
