"""Repacks a GGUF file's quantized tensors into the blocks of `quantized_linear`, losslessly.

A type is supported if each group of 16 or 32 inputs is integers or codes times a scale, optionally
plus a minimum, and both are exact in float32. Types of superblocks keep their scales and minimums.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from llmc.kernels.cpu.pack_gguf import pack_gguf
from llmc.kernels.quantized_linear import (
    CHANNELS,
    INPUTS,
    TABLES,
    Format,
    Part,
    Quantization,
    Scale,
    pack_groups,
    pack_weight,
)

Array = NDArray[Any]
RowOrder = NDArray[np.int64] | slice  # the row of each channel; slice(None): they are in order
_AT_ONCE = 1 << 20  # values packed at a time in numpy, which takes several bytes for each


@dataclass(frozen=True, slots=True)
class Steps:
    """Scales or minimums of B superblocks: `factor` [B, 1] float16 times `steps` [B, groups]."""

    factor: Array
    steps: Array

    def numbers(self) -> Array:
        """[B, groups] in float32."""
        return self.factor.astype(np.float32) * self.steps.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """The contents of B blocks: `q` [B, values], `scale` and `minimum` [B, groups] in float32.

    q are codes for IQ types. For MXFP4: codes and exponents; an exponent of 255 means NaN, as in
    the format's specification.
    """

    q: Array
    scale: Array | Steps
    minimum: Array | Steps | None = None


def _factor(blocks: Array, start: int) -> Array:
    return blocks[:, start : start + 2].copy().view(np.float16)


def _half(blocks: Array, start: int) -> Array:
    return _factor(blocks, start).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """[B, 16] -> [B, 32]: the lower halves are the first values."""
    words = np.ascontiguousarray(packed).view(np.uint64)  # eight at a time
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.concatenate((words & low, words >> np.uint64(4) & low), axis=-1).view(np.uint8)


def _fifth_bits(blocks: Array, start: int) -> Array:
    """Bit i of a 32-bit word -> value i, as 0 or 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little")
    return (bits << 4).astype(np.uint8)


def _q4_0(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 2:]), scale=_half(blocks, 0))


def _q4_1(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 4:]), scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Array) -> Integers:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return Integers(q=q, scale=_half(blocks, 0))


def _q5_1(blocks: Array) -> Integers:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Integers(q=q, scale=_half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Array) -> Integers:
    return Integers(q=blocks[:, 2:].view(np.int8), scale=_half(blocks, 0))


def _scaled_groups(blocks: Array) -> tuple[Steps, Steps]:
    """Scales and minimums of the eight groups of a Q4_K or Q5_K block, stored in 6 bits each."""
    low, high, mixed = np.split(blocks[:, 4:16], 3, axis=1)
    scale = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1)
    minimum = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1)
    return Steps(_factor(blocks, 0), scale), Steps(-_factor(blocks, 2), minimum)


def _q4_k(blocks: Array) -> Integers:
    scale, minimum = _scaled_groups(blocks)
    q = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Integers(q=q, scale=scale, minimum=minimum)


def _q5_k(blocks: Array) -> Integers:
    scale, minimum = _scaled_groups(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = (low | fifth << 4).reshape(-1, 256)
    return Integers(q=q, scale=scale, minimum=minimum)


def _two_bits(packed: Array) -> Array:
    """[B, 32 n] -> [B, n, 4, 32]: each byte has one value of each of four runs of 32."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return packed.reshape(len(packed), -1, 1, 32) >> shifts & 3


def _q2_k(blocks: Array) -> Integers:
    return Integers(
        q=_two_bits(blocks[:, 16:80]).reshape(-1, 256),
        scale=Steps(_factor(blocks, 80), blocks[:, :16] & 15),
        minimum=Steps(-_factor(blocks, 82), blocks[:, :16] >> 4),
    )


def _q3_k(blocks: Array) -> Integers:
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32)
    packed = blocks[:, 96:108]
    scale = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high = (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    steps = (scale | high << 4).astype(np.int8) - np.int8(32)
    # -4 to 3, in the int4 encoding in which 8 means zero
    q = ((low | third << 2) + 4).reshape(-1, 256)
    return Integers(q=q, scale=Steps(_factor(blocks, 108), steps))


def _q6_k(blocks: Array) -> Integers:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = _two_bits(blocks[:, 128:192])
    q = low.reshape(-1, 2, 4, 32) | high << 4
    return Integers(
        q=q.reshape(-1, 256),
        scale=Steps(_factor(blocks, 208), blocks[:, 192:208].view(np.int8)),
    )


def _iq4_nl(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 2:]), scale=_half(blocks, 0))


def _iq4_xs(blocks: Array) -> Integers:
    high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    steps = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    q = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return Integers(q=q, scale=Steps(_factor(blocks, 0), steps))


def _mxfp4(blocks: Array) -> Integers:
    return Integers(q=_nibbles(blocks[:, 1:]), scale=blocks[:, :1])


# In IQ1, IQ2 and IQ3 types, eight or four weights are an entry of a grid. Scales are (2 s + 1) d
# with s of 3 or 4 bits; constant factors are part of the values, as d / 8 is not exact in float16.


def _odd(factor: Array, s: Array) -> Steps:
    return Steps(factor, (2 * s + 1).astype(np.int8))


@cache
def _grid(kind: type[Any], to: Format, unit: float, offset: float = 0.0) -> Array:
    """A grid's entries as words of eight or four codes, for `unit` times its numbers, plus
    `offset`."""
    kind.init_grid()
    numbers = kind.grid[0, 0] * unit + offset
    codes = (numbers[..., None] == np.array(TABLES[to])).argmax(-1).astype(np.uint8)
    words: Array = codes.view(f"u{codes.shape[1]}")[:, 0]
    return words


def _signs() -> Array:
    """For each byte, a word that adds the signs of eight weights, one per bit, to their codes."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 3
    words: Array = bits.view(np.uint64)[:, 0]
    return words


_SIGNS = _signs()
_SEVEN_SIGNS = _SIGNS[np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)]  # the parity implies one


def _in_sevens(words: Array) -> Array:
    """[B, 8] -> words of signs [B, 32]: seven bits for eight weights."""
    signs: Array = _SEVEN_SIGNS[words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127]
    return signs.reshape(-1, 32)


def _in_halves(packed: Array) -> Array:
    """[B, n] -> [B, 2 n]: the lower half of a byte, then the upper one."""
    return (packed[..., None] >> np.array([0, 4], np.uint8) & 15).reshape(len(packed), -1)


def _iq2_xxs(blocks: Array) -> Integers:
    words = blocks[:, 2:].copy().view("<u4").reshape(-1, 8, 2)
    entries = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    q = _grid(quants.IQ2_XXS, "iq2", 1 / 8)[entries] | _in_sevens(words[..., 1])
    return Integers(q=q.view(np.uint8), scale=_odd(_factor(blocks, 0), words[..., 1] >> 28))


def _iq2_xs(blocks: Array) -> Integers:
    words = blocks[:, 2:66].copy().view("<u2")
    q = _grid(quants.IQ2_XS, "iq2", 1 / 8)[words & 511] | _SEVEN_SIGNS[words >> 9]
    return Integers(q=q.view(np.uint8), scale=_odd(_factor(blocks, 0), _in_halves(blocks[:, 66:])))


def _iq2_s(blocks: Array) -> Integers:
    high = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    entries = blocks[:, 2:34] | high.reshape(-1, 32).astype(np.uint16) << 8
    q = _grid(quants.IQ2_S, "iq2", 1 / 8)[entries] | _SIGNS[blocks[:, 34:66]]
    return Integers(q=q.view(np.uint8), scale=_odd(_factor(blocks, 0), _in_halves(blocks[:, 74:])))


def _iq3_xxs(blocks: Array) -> Integers:
    words = blocks[:, 66:].copy().view("<u4")
    fours = _grid(quants.IQ3_XXS, "iq3_xxs", 1 / 4)[blocks[:, 2:66]]
    q = fours.view(np.uint64) | _in_sevens(words)
    return Integers(q=q.view(np.uint8), scale=_odd(_factor(blocks, 0), words >> 28))


def _iq3_s(blocks: Array) -> Integers:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    fours = _grid(quants.IQ3_S, "iq3_s", 1.0)[blocks[:, 2:66] | high << 8]
    q = fours.view(np.uint64) | _SIGNS[blocks[:, 74:106]]
    return Integers(q=q.view(np.uint8), scale=_odd(_factor(blocks, 0), _in_halves(blocks[:, 106:])))


def _of_iq1(entries: Array, is_below: Array, scale: Steps) -> Integers:
    """Entries of a grid of -1, 0 and 1 [B, 32], which are an eighth higher, or lower."""
    above, below = (_grid(quants.IQ1_S, "iq2", 1.0, offset) for offset in (1 / 8, -1 / 8))
    words = np.where(is_below, below[entries], above[entries])
    return Integers(q=words.view(np.uint8), scale=scale)


def _iq1_s(blocks: Array) -> Integers:
    words = blocks[:, 34:].copy().view("<u2")
    high = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    entries = blocks[:, 2:34] | high.reshape(-1, 32) << 8
    scale = _odd(_factor(blocks, 0), words >> 12 & 7)
    return _of_iq1(entries, np.repeat(words > 0x7FFF, 4, axis=1), scale)


def _iq1_m(blocks: Array) -> Integers:
    high = _in_halves(blocks[:, 32:48])
    words = blocks[:, 48:].copy().view("<u2")
    digits = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    factor = np.bitwise_or.reduce(digits, axis=1, keepdims=True).view(np.float16)
    s = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    entries = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    return _of_iq1(entries, high > 7, _odd(factor, s))


def _tq1_0(blocks: Array) -> Integers:
    """Five digits to the base of 3 in a byte, four in the last ones, as fractions of 256."""

    def digits(packed: Array, count: int) -> Array:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return (packed[:, None] * powers).astype(np.uint16).reshape(len(packed), -1) * 3 >> 8

    parts = digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)
    q = np.concatenate(parts, axis=1).astype(np.uint8) + np.uint8(7)
    return Integers(q=q, scale=_half(blocks, 52))


def _tq2_0(blocks: Array) -> Integers:
    return Integers(q=(_two_bits(blocks[:, :64]) + 7).reshape(-1, 256), scale=_half(blocks, 64))


@dataclass(frozen=True, slots=True)
class _Kind:
    """The format in which a type is kept, and the function that reads its blocks."""

    format: Format
    read: Callable[[Array], Integers]
    minimum: bool = False
    group: int = 32
    scale: Scale = "float32"


_KINDS = {
    Type.Q4_0: _Kind("int4", _q4_0, scale="float16"),
    Type.Q4_1: _Kind("int4", _q4_1, minimum=True, scale="float16"),
    Type.Q5_0: _Kind("int5", _q5_0, scale="float16"),
    Type.Q5_1: _Kind("int5", _q5_1, minimum=True, scale="float16"),
    Type.Q8_0: _Kind("int8", _q8_0, scale="float16"),
    Type.Q2_K: _Kind("int4", _q2_k, minimum=True, group=16, scale="superblock"),
    Type.Q3_K: _Kind("int4", _q3_k, group=16, scale="superblock"),
    Type.Q4_K: _Kind("int4", _q4_k, minimum=True, scale="superblock"),
    Type.Q5_K: _Kind("int5", _q5_k, minimum=True, scale="superblock"),
    Type.Q6_K: _Kind("int6", _q6_k, group=16, scale="superblock"),
    Type.IQ4_NL: _Kind("iq4", _iq4_nl, scale="float16"),
    Type.IQ4_XS: _Kind("iq4", _iq4_xs, scale="superblock"),
    Type.MXFP4: _Kind("mxfp4", _mxfp4, scale="exponent"),
    Type.IQ1_S: _Kind("iq2", _iq1_s, scale="superblock"),
    Type.IQ1_M: _Kind("iq2", _iq1_m, group=16, scale="superblock"),
    Type.IQ2_XXS: _Kind("iq2", _iq2_xxs, scale="superblock"),
    Type.IQ2_XS: _Kind("iq2", _iq2_xs, group=16, scale="superblock"),
    Type.IQ2_S: _Kind("iq2", _iq2_s, group=16, scale="superblock"),
    Type.IQ3_XXS: _Kind("iq3_xxs", _iq3_xxs, scale="superblock"),
    Type.IQ3_S: _Kind("iq3_s", _iq3_s, scale="superblock"),
    Type.TQ1_0: _Kind("int4", _tq1_0, group=256, scale="float16"),
    Type.TQ2_0: _Kind("int4", _tq2_0, group=256, scale="float16"),
}
KEPT = tuple(_KINDS)


def kept_as(kind: Type, depth: int) -> Quantization | None:
    """The op's format for a matrix of this type with `depth` inputs; None if it can't represent it
    exactly."""
    held = _KINDS.get(kind)
    if held is None or depth % INPUTS:
        return None
    return Quantization(
        format=held.format,
        group=held.group,
        scale=held.scale,
        minimum=held.minimum,
    )


def fill_blocks(
    raw: Array, kind: Type, to: Quantization, out: Mapping[Part, torch.Tensor], order: RowOrder
) -> None:
    """Rows of a file [N, bytes], in this order, -> the weight inputs of `quantized_linear`. `to` is
    the format of `kept_as`, or has separate scales in float32 in place of its superblocks."""
    rows = None if isinstance(order, slice) else order
    if pack_gguf(raw, kind, out, rows):
        return
    values = raw.shape[1] // GGML_QUANT_SIZES[kind][1] * GGML_QUANT_SIZES[kind][0]
    blocks = max(1, _AT_ONCE // (CHANNELS * values))
    for start in range(0, len(out["weight"]), blocks):
        some = slice(start * CHANNELS, (start + blocks) * CHANNELS)
        made = reference_blocks(raw[some if rows is None else rows[some]], kind, to)
        for part, place in out.items():
            place[start : start + blocks].copy_(made[part])


def reference_blocks(raw: Array, kind: Type, to: Quantization) -> dict[Part, torch.Tensor]:
    """The same in numpy, for all types: the fallback, and what C++ is tested against."""
    channels = len(raw)
    with np.errstate(invalid="ignore"):  # an infinite scale times 0 is NaN, as the file implies
        blocks = np.ascontiguousarray(raw).reshape(-1, GGML_QUANT_SIZES[kind][1])
        integers = _KINDS[kind].read(blocks)
        q = torch.from_numpy(np.ascontiguousarray(integers.q).reshape(channels, -1))
        parts: dict[Part, torch.Tensor] = {"weight": pack_weight(q, to)}
        for part, values in _scales(integers, to).items():
            rows = torch.from_numpy(values.reshape(channels, -1).copy())
            parts[part] = pack_groups(rows.to(to.dtypes[part]))
    return parts


def _scales(integers: Integers, to: Quantization) -> dict[Part, Array]:
    """What `to` has besides the weight [B, groups or words]."""
    given = [part for part in (integers.scale, integers.minimum) if part is not None]
    if to.scale == "superblock":
        return {"scale": _superblock([part for part in given if isinstance(part, Steps)])}
    wide = [part.numbers() if isinstance(part, Steps) else part for part in given]
    names: tuple[Part, ...] = ("scale", "minimum")
    return dict(zip(names, wide, strict=False))


def _superblock(parts: Sequence[Steps]) -> Array:
    """Scales and any minimums as int16 words of `quantized_linear` [B, words]."""
    steps = np.stack([part.steps.astype(np.int8) for part in parts], axis=-1)
    words = steps.reshape(len(steps), -1).view(np.int16)
    return np.concatenate([*(part.factor.view(np.int16) for part in parts), words], axis=1)
