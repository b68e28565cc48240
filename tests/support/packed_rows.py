"""Rows of GGUF files for tests of what packs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from llmc.kernels.quantized_linear import Part, Quantization

# the types that pack_gguf.cpp supports
KINDS = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.IQ4_NL),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS),
)


def drawn_rows(kind: Type, channels: int, depth: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[channels, bytes] of random bits, which include NaN and infinity as scales, and rows with all
    bits clear or set."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(channels + depth)
    rows = rng.integers(0, 256, (channels, depth // size * num_bytes), np.uint8)
    rows[3], rows[5] = 0, 255
    return rows


def empty_parts(to: Quantization, *size: int) -> dict[Part, Tensor]:
    """Weight inputs of `quantized_linear` for a weight of this size, with every bit set."""
    parts: dict[Part, Tensor] = {}
    for part, dtype in to.dtypes.items():
        shape = to.shape(part, *size)
        parts[part] = torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8)
        parts[part] = parts[part].view(dtype).squeeze(-1)
    return parts


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, with any NaN of float16 as one: files have several."""
    if tensor.dtype == torch.float16:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.view(torch.uint8)
