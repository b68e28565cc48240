"""Quantized tensors of a GGUF file in the blocks of `quantized_linear`, value for value the same.

A type is kept where each group of 32 inputs is integers times a scale, or that plus a minimum, and
both are exact in float32. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from llmc.kernels.quantized_linear import (
    CHANNELS,
    INPUTS,
    Format,
    Part,
    Quantization,
    pack_groups,
    pack_weight,
)

GROUP = 32
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Of blocks [B]: `q` [B, values], `scale` and `minimum` [B, groups] in float32."""

    q: Array
    scale: Array
    minimum: Array | None = None


def _half(blocks: Array, start: int) -> Array:
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """[B, 16] -> [B, 32]: the lower halves are the first values."""
    words = np.ascontiguousarray(packed).view(np.uint64)  # eight at a time
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.concatenate((words & low, words >> np.uint64(4) & low), axis=-1).view(np.uint8)


def _fifth_bits(blocks: Array, start: int) -> Array:
    """Bit i of a word -> value i, as 0 or 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little")
    return (bits << 4).astype(np.uint8)


def _q4_0(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 2:]), scale=_half(blocks, 0))


def _q4_1(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 4:]), scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Array) -> Integers:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return Integers(q=q.astype(np.int8) - np.int8(16), scale=_half(blocks, 0))


def _q5_1(blocks: Array) -> Integers:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Integers(q=q.astype(np.int8), scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Array) -> Integers:
    return Integers(q=blocks[:, 2:].view(np.int8), scale=_half(blocks, 0))


def _scaled_groups(blocks: Array) -> tuple[Array, Array]:
    """Scales and minimums of the eight groups of a Q4_K or Q5_K block, 6 bits each."""
    low, high, mixed = np.split(blocks[:, 4:16], 3, axis=1)
    scale = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1)
    minimum = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1)
    least = _half(blocks, 2) * minimum.astype(np.float32)
    return _half(blocks, 0) * scale.astype(np.float32), -least


def _q4_k(blocks: Array) -> Integers:
    scale, minimum = _scaled_groups(blocks)
    q = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Integers(q=q, scale=scale, minimum=minimum)


def _q5_k(blocks: Array) -> Integers:
    scale, minimum = _scaled_groups(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = (low | fifth << 4).reshape(-1, 256)
    return Integers(q=q.astype(np.int8), scale=scale, minimum=minimum)


def _iq4_nl(blocks: Array) -> Integers:
    values = np.array(quants.IQ4_NL.kvalues, np.int8)
    return Integers(q=values[_nibbles(blocks[:, 2:])], scale=_half(blocks, 0))


def _iq4_xs(blocks: Array) -> Integers:
    values = np.array(quants.IQ4_NL.kvalues, np.int8)
    high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    steps = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    q = values[_nibbles(blocks[:, 8:].reshape(-1, 16))].reshape(-1, 256)
    return Integers(q=q, scale=_half(blocks, 0) * steps)


def _mxfp4(blocks: Array) -> Integers:
    values = np.array(quants.MXFP4.kvalues, np.int8)
    exponent = blocks[:, :1].astype(np.uint32)
    small = np.where(exponent < 2, 0x00200000 << exponent, exponent - 1 << 23)
    return Integers(q=values[_nibbles(blocks[:, 1:])], scale=small.astype("<u4").view(np.float32))


_READERS: dict[Type, tuple[Format, bool, Callable[[Array], Integers]]] = {
    Type.Q4_0: ("int4", False, _q4_0),
    Type.Q4_1: ("int4", True, _q4_1),
    Type.Q5_0: ("int8", False, _q5_0),
    Type.Q5_1: ("int8", True, _q5_1),
    Type.Q8_0: ("int8", False, _q8_0),
    Type.Q4_K: ("int4", True, _q4_k),
    Type.Q5_K: ("int8", True, _q5_k),
    Type.IQ4_NL: ("int8", False, _iq4_nl),
    Type.IQ4_XS: ("int8", False, _iq4_xs),
    Type.MXFP4: ("int8", False, _mxfp4),
}
KEPT = tuple(_READERS)


def kept_as(kind: Type, channels: int, depth: int) -> Quantization | None:
    """None where the op can't have a matrix of this type exactly."""
    if kind not in _READERS or channels % CHANNELS or depth % INPUTS:
        return None
    format, minimum, _ = _READERS[kind]
    return Quantization(format=format, group=GROUP, wide_scale=format == "int4", minimum=minimum)


def to_blocks(raw: Array, kind: Type, to: Quantization) -> dict[Part, torch.Tensor]:
    """Rows of a file [N, bytes] -> what `quantized_linear` takes."""
    channels = len(raw)
    integers = _READERS[kind][2](raw.reshape(-1, _block_bytes(kind)))
    q = torch.from_numpy(np.ascontiguousarray(integers.q).reshape(channels, -1))
    parts: dict[Part, torch.Tensor] = {"weight": pack_weight(q, to)}
    groups: tuple[tuple[Part, Array | None], ...] = (
        ("scale", integers.scale),
        ("minimum", integers.minimum),
    )
    for part, values in groups:
        if values is not None:
            parts[part] = pack_groups(torch.from_numpy(values.reshape(channels, -1).copy()))
    return parts


def _block_bytes(kind: Type) -> int:

    return GGML_QUANT_SIZES[kind][1]
