"""`quantized_linear`: a linear over a weight of 4 to 8 bits, which is dequantized as it is read.

A weight is divided into blocks of 16 channels; the last channel is repeated where they are not a
multiple of 16. A line of a block holds four bytes of each channel, so that one thread or program
reads a block as one stream, and a vector register holds a line.

Formats: int8, fp8 (e4m3) and int4 (two values per byte, low half first), with scales in float32 or
16 bits; and mxfp4, which packs e2m1 values like int4, with power-of-two scales of one byte each
(OCP microscaling formats). A scale is for a whole channel or for a group of its inputs, as the
shapes imply. `quantize` uses one scale per channel for 8 bits; checkpoints can also have groups.

nvfp4, iq4, iq3_s, iq3_xxs and iq2 are codes of four bits, stored like int4, whose values are in a
table: e2m1 numbers with other scales than mxfp4's, and those of GGUF's types IQ4, IQ3_S, IQ3_XXS,
and IQ2 and IQ1. Lines are counted in pairs or in fours, of uint8, int8 or float8_e5m2, which tells
the formats apart.

int5 and int6 have several lines for 32 or 16 inputs, so that they are unpacked with few operations.
Each line has the low bits of four inputs per channel; the last inputs are in what its bytes have
left. int6: three lines, and bits 0-1, 2-3 and 4-5 of the last four inputs. int5: five lines; then
bits 0-2 and 3-4 of inputs 20-23 (first and second line), 24-27 (third and fourth), and of 28-31
bits 0-2 (fifth line), 3 and 4 (last bit of the second and fourth).

Scales of GGUF's K-quants are in superblocks of 256 inputs: a float16 factor, times 8-bit steps of
16 or 32 inputs each. So are minimums, if there are any. Per channel, a superblock is int16 words:
the bits of the factor, then two steps in a word, the first in its low byte; or with minimums: the
bits of both factors, then a word of both steps for each group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.registry import Case, op

Format = Literal[
    "int8", "int4", "int5", "int6", "fp8", "mxfp4", "nvfp4", "iq4", "iq3_s", "iq3_xxs", "iq2"
]  # fmt: skip
Scale = Literal["float32", "float16", "bfloat16", "exponent", "superblock"]
Part = Literal["weight", "scale", "zero", "minimum", "order"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "fp8")  # formats that `quantize` supports
CHANNELS = 16  # per block
INPUTS = 32  # the depth is a multiple of this
EXACT_BITS = 24  # bits of x in float32: it is not rounded
GROUPS = (128, 64, 32)  # group sizes for int4
SUPERBLOCK = 256  # inputs
LINE = 4  # bytes per channel
# the values that stand for 0 without zero points and minimums
MIDDLES: dict[Format, int] = {"int4": 8, "int5": 16, "int6": 32}
_DTYPES = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "int5": torch.uint8,
    "int6": torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "iq4": torch.uint8,
    "iq3_s": torch.uint8,
    "iq3_xxs": torch.int8,  # of codes, like the next
    "iq2": torch.int8,
    "nvfp4": torch.float8_e5m2,  # of codes, too
}
_SCALES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "exponent": torch.uint8,
    "superblock": torch.int16,
}
# (inputs, lines) that are stored together, if they are not a line of four or eight inputs
_UNITS: dict[Format, tuple[int, int]] = {
    "int5": (32, 5),
    "int6": (16, 3),
    "nvfp4": (16, 2),
    "iq4": (16, 2),
    "iq3_s": (32, 4),
    "iq3_xxs": (32, 4),
    "iq2": (16, 2),
}
_WIDE = {(_DTYPES[form], lines): form for form, (_, lines) in _UNITS.items()}


def _signed(*sizes: float) -> tuple[float, ...]:
    """The values of codes 0 to 7; 8 to 15 are their negatives."""
    return (*sizes, *(-size for size in sizes))


_E2M1 = _signed(0.0, 0.5, 1, 1.5, 2, 3, 4, 6)  # which has a -0
# the values of formats with codes of four bits
TABLES: dict[Format, tuple[float, ...]] = {
    "mxfp4": _E2M1,
    "nvfp4": _E2M1,
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "iq3_s": _signed(1, 3, 5, 7, 9, 11, 13, 15),
    "iq3_xxs": _signed(1, 3, 5, 7, 9, 11, 13, 15.5),
    # sums of -1, 0 or 1 and 1/8 or -1/8 in IQ1; a quarter of 4, 12.5 or 21.5 in IQ2
    "iq2": _signed(1 / 8, 7 / 8, 9 / 8, 1, 25 / 8, 43 / 8, 0, 0),
}
_FP8_MAX = 448.0


def _shape(*, x: Tensor, weight: Tensor, **others: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] * CHANNELS)


@op(shape=_shape)
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    minimum: Tensor | None = None,
    x_bits: int = EXACT_BITS,
) -> Tensor:
    """x [..., K] -> x w^T + bias [..., N] in x's dtype, with w[n, k] = (q[n, k] - zero) * scale.

    weight [N / 16, lines, 64] is q in blocks: int8 and float8_e4m3fn have K / 4 lines, uint8 (two
    values per byte) K / 8. Or it is uint8 [N / 16, K / 32, 320] for int5, [N / 16, K / 16, 192] for
    int6, [N / 16, K / 16, 128] for iq4 (int8: iq2, float8_e5m2: nvfp4), and [N / 16, K / 32, 256]
    for iq3_s (int8: iq3_xxs). scale [N / 16, K / group, 16]: float32, float16 or bfloat16; group
    sizes are multiples of 16, or of 32 for int5, iq3_s and iq3_xxs. zero: uint8 with the shape of
    scale, for int4 only; None means 8 (16 for int5, 32 for int6). bias [N]. minimum: float32 or
    float16 with the shape of scale, for integers without zero; then w = q * scale + minimum.
    A uint8 scale is an exponent: 2 ** (scale - 127), 255 is NaN. Then q are e2m1 codes in uint8,
    and there is neither zero nor minimum. An int16 scale [N / 16, K / 256 * words, 16] has scales
    and minimums in superblocks, for integers; then zero and minimum are None.
    Summed in float32 and rounded once.
    x_bits: EXACT_BITS; or 16 if q are not float8, or 8 if they are int4, int5 or int6: x is
    rounded with `round_inputs`. Or 8 if q are float8 and groups multiples of 32: with
    `round_to_fp8`.
    """
    w = dequantize(weight, scale, zero, minimum)
    x32, group = x.float(), groups_of(scale, x.shape[-1]).size
    if x_bits < EXACT_BITS and weight.dtype == torch.float8_e4m3fn:
        x32 = round_to_fp8(x32, group)
    elif x_bits < EXACT_BITS:
        x32 = round_inputs(x32, x_bits, group)
    return F.linear(x32, w, None if bias is None else bias.float()).to(x.dtype)


def take_channels(blocks: Tensor, channels: Tensor) -> Tensor:
    """`channels` [M] of a weight, or of its scales, zeros or minimums, in blocks [N / 16, n, 16 k]
    -> [M / 16, n, 16 k]."""
    num, lines, width = blocks.shape
    flat = blocks.view(num, -1, CHANNELS, LINE if width % (CHANNELS * LINE) == 0 else 1)
    rows = flat.transpose(1, 2).flatten(0, 1)[channels]
    back = rows.view(-1, CHANNELS, *rows.shape[1:]).transpose(1, 2)
    return back.reshape(-1, lines, width)


def inputs_of(weight: Tensor) -> int:
    """K, from the shape of a weight [.., N / 16, lines, bytes]."""
    return weight.shape[-2] * _per_line(weight)


def packed_format(weight: Tensor) -> Format | None:
    """int5, int6 or one with a table other than mxfp4, if the dtype and shape [.., N / 16, lines,
    bytes] of a weight say so."""
    return _WIDE.get((weight.dtype, weight.shape[-1] // (CHANNELS * LINE)))


def _is_4_bit(format: Format) -> bool:
    return format == "int4" or format in TABLES


def _per_line(weight: Tensor) -> int:
    if (form := packed_format(weight)) is not None:
        return _UNITS[form][0]
    return 8 if weight.dtype == torch.uint8 else 4


def supports_bits(weight: Tensor, scale: Tensor, bits: int) -> int:
    """The smallest `x_bits`, at least `bits`, that a weight of `quantized_linear` (or experts)
    supports."""
    if weight.dtype == torch.float8_e4m3fn:
        group = inputs_of(weight) // scale.shape[-2]
        return bits if bits == 8 and group % INPUTS == 0 else EXACT_BITS
    is_table = scale.dtype == torch.uint8 or packed_format(weight) in TABLES
    if weight.dtype != torch.uint8 or is_table:
        return max(bits, 16)
    return bits


def round_inputs(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., K] float32 -> x rounded to fixed point of 8 or 16 bits, in float32.

    Every 32 inputs share a scale, or every 16 if `group`, the group size of the weight, is not a
    multiple of 32. The scale is the largest magnitude over 127 for 8 bits, or the smallest power of
    two with which the largest magnitude fits in two signed bytes. Inputs that share a scale with a
    non-finite input become NaN.
    """
    parts = x.unflatten(-1, (-1, INPUTS if group % INPUTS == 0 else INPUTS // 2))
    largest = parts.abs().amax(-1, keepdim=True)
    if bits == 8:
        scale = largest / 127
    else:
        part, exponent = torch.frexp(largest)
        exponent = exponent - 15 + (part * 2**15 > 127 * 257 - 1).int()
        scale = ((exponent + 127) << 23).view(torch.float32)
    inverse = torch.where(largest > 1e-30, 1 / scale, 0)
    inverse = torch.where(largest.isfinite(), inverse, torch.nan)
    rounded: Tensor = (parts * inverse).round() * scale
    return rounded.flatten(-2)


def round_to_fp8(x: Tensor, group: int) -> Tensor:
    """x [..., K] float32 -> x rounded to e4m3, in float32.

    Inputs share a scale as those of the weight do: all of a row, or every `group`. The scale is
    the largest magnitude over 448, the largest number of e4m3. Inputs that share a scale with a
    non-finite input become NaN.
    """
    parts = x.unflatten(-1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    # by a tensor: on GPUs torch multiplies by the reciprocal of a number, which rounds otherwise
    scale = torch.where(largest.isfinite(), largest / torch.full_like(largest, _FP8_MAX), torch.nan)
    codes = (parts / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    rounded = torch.where(largest <= 1e-30, 0, codes.float() * scale)
    return rounded.flatten(-2)


def dequantize(
    weight: Tensor, scale: Tensor, zero: Tensor | None = None, minimum: Tensor | None = None
) -> Tensor:
    """The weight [N, K] in float32."""
    rows = _from_blocks(weight, LINE).unflatten(1, (-1, weight.shape[2] // CHANNELS))
    parts = (None if part is None else _from_blocks(part, 1) for part in (zero, minimum))
    return numbers(rows, _from_blocks(scale, 1), *parts)


def numbers(
    stored: Tensor, scale: Tensor, zero: Tensor | None = None, minimum: Tensor | None = None
) -> Tensor:
    """Dequantize rows [..., lines, bytes] with per-group scales, zeros or minimums [..., G]:
    [..., K]."""
    form: Format | None = _WIDE.get((stored.dtype, stored.shape[-1] // LINE))
    if scale.dtype == torch.uint8:
        form, scale = "mxfp4", powers_of_two(scale)
    codes, middle = _codes(stored, form)
    if scale.dtype == torch.int16:
        scale, minimum = read_superblocks(scale, codes.shape[-1])
    if form in TABLES:
        known = torch.tensor(TABLES[form], dtype=torch.float32, device=stored.device)
        return known[codes.int()] * _spread(scale, codes)
    values = codes.float()
    if minimum is not None:
        return values * _spread(scale, values) + _spread(minimum, values)
    values = values - (middle if zero is None else _spread(zero, values))
    return values * _spread(scale, values)


def _codes(stored: Tensor, form: Format | None) -> tuple[Tensor, int]:
    """[..., lines, bytes] -> q [..., K], and the value that stands for 0. `form`: as in
    `packed_format`, or mxfp4."""
    if form in ("int5", "int6"):
        unit = stored.unflatten(-1, (-1, LINE))
        return (_codes_of_5 if form == "int5" else _codes_of_6)(unit), MIDDLES[form]
    if form is None and stored.dtype != torch.uint8:
        return stored.flatten(-2), 0
    bytes = stored.view(torch.uint8)
    return torch.stack((bytes & 15, bytes >> 4), dim=-1).flatten(-3), MIDDLES["int4"]


def _codes_of_6(unit: Tensor) -> Tensor:
    """[..., units, 3, 4] -> [..., K]."""
    a, b, c = unit.unbind(-2)
    return _in_order(unit & 63, [a >> 6 | b >> 6 << 2 | c >> 6 << 4])


def _codes_of_5(unit: Tensor) -> Tensor:
    """[..., units, 5, 4] -> [..., K]."""
    a, b, c, d, e = unit.unbind(-2)
    last = [a >> 5 | (b >> 5 & 3) << 3, c >> 5 | (d >> 5 & 3) << 3]
    last.append(e >> 5 | b >> 7 << 3 | d >> 7 << 4)
    return _in_order(unit & 31, last)


def _in_order(first: Tensor, last: Sequence[Tensor]) -> Tensor:
    """[..., units, lines, 4] and more lines [..., units, 4] of each -> [..., K]."""
    return torch.cat((first, torch.stack(list(last), -2)), -2).flatten(-3)


@dataclass(frozen=True, slots=True)
class Groups:
    """`size`: inputs that share a scale. `minimum`: whether superblocks have minimums."""

    size: int
    minimum: bool = False

    @property
    def words(self) -> int:
        """Of a channel in a superblock."""
        return (1 + SUPERBLOCK // self.size // 2) * (2 if self.minimum else 1)


_SUPERBLOCKS = {g.words: g for g in (Groups(n, least) for n in (16, 32) for least in (False, True))}


def groups_of(scale: Tensor, depth: int) -> Groups:
    """The groups of a weight's `depth` inputs, from its scales [..., K / group or words, 16]."""
    if scale.dtype == torch.int16:
        return _SUPERBLOCKS[scale.shape[-2] // (depth // SUPERBLOCK)]
    return Groups(depth // scale.shape[-2])


def read_superblocks(rows: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
    """int16 [..., K / 256 * words] -> scales and any minimums [..., K / group] in float32."""
    supers = depth // SUPERBLOCK
    groups = _SUPERBLOCKS[rows.shape[-1] // supers]
    parts = 2 if groups.minimum else 1
    words = rows.unflatten(-1, (supers, -1))
    factors = words[..., :parts].view(torch.float16).float()
    steps = words[..., parts:].contiguous().view(torch.int8).float()
    found = [(factors[..., i : i + 1] * steps[..., i::parts]).flatten(-2) for i in range(parts)]
    return found[0], found[1] if groups.minimum else None


def powers_of_two(exponents: Tensor) -> Tensor:
    """E8M0: uint8 -> 2 ** (e - 127) in float32; 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()


def _spread(groups: Tensor, like: Tensor) -> Tensor:
    """[..., K / group] -> [..., K] float32."""
    return groups.float().repeat_interleave(like.shape[-1] // groups.shape[-1], dim=-1)


def _to_blocks(rows: Tensor, width: int) -> Tensor:
    """[N, W] -> [N / 16, W / width, 16 * width]."""
    if width == LINE and rows.dtype.itemsize == 1:  # moving words is faster than moving bytes
        words = _to_blocks(rows.contiguous().view(torch.int32), 1)
        return words.view(rows.dtype)
    n, columns = rows.shape
    blocks = rows.view(n // CHANNELS, CHANNELS, columns // width, width)
    return blocks.transpose(1, 2).contiguous().view(n // CHANNELS, -1, CHANNELS * width)


def _from_blocks(blocks: Tensor, width: int) -> Tensor:
    """The inverse of `_to_blocks`."""
    count = blocks.shape[0]
    rows = blocks.view(count, -1, CHANNELS, width).transpose(1, 2)
    return rows.reshape(count * CHANNELS, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The format of a weight in memory. `group`: inputs that share a scale; 0: all of a channel.

    `scale`: the dtype of scales; "exponent" is that of mxfp4, "superblock" that of K-quants.
    `zero`: int4 with zero points. `minimum`: integers with a minimum per group (the value of a 0),
    in superblocks or float16 if the scales are, else in float32. `transposed`: a weight of experts
    that comes from [E, K, N]; in memory channels still come first. `order`: a digest of the order
    [K] in which the op gets the inputs of a linear, so that those of a group are consecutive; "":
    they are in the model's order.
    """

    format: Format
    group: int = 0
    scale: Scale = "float32"
    zero: bool = False
    minimum: bool = False
    transposed: bool = False
    order: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.format]

    @property
    def scale_dtype(self) -> torch.dtype:
        return _SCALES[self.scale]

    @property
    def dtypes(self) -> dict[Part, torch.dtype]:
        """The dtypes of the tensors that represent the weight."""
        zero: dict[Part, torch.dtype] = {"zero": torch.uint8} if self.zero else {}
        least = torch.float16 if self.scale == "float16" else torch.float32
        is_apart = self.minimum and self.scale != "superblock"
        low: dict[Part, torch.dtype] = {"minimum": least} if is_apart else {}
        order: dict[Part, torch.dtype] = {"order": torch.int32} if self.order else {}
        return {"weight": self.dtype, "scale": self.scale_dtype, **zero, **low, **order}

    @property
    def _unit(self) -> tuple[int, int]:
        """Inputs that are stored together in a number of lines."""
        return _UNITS.get(self.format, (8 if _is_4_bit(self.format) else 4, 1))

    def shape(self, part: Part, *size: int) -> tuple[int, ...]:
        """The shape of the quantized weight, its scales, zero points, minimums, or order.

        size: [N, K] of the weight, or [E, N, K] for experts, where E comes first in the result too.
        """
        *experts, channels, depth = size
        if part == "order":
            return (depth,)
        blocks = -(-channels // CHANNELS)
        if part == "weight":
            inputs, lines = self._unit
            return *experts, blocks, depth // inputs, lines * CHANNELS * LINE
        if self.scale == "superblock":
            words = Groups(self.group, self.minimum).words
            return *experts, blocks, depth // SUPERBLOCK * words, CHANNELS
        return *experts, blocks, depth // (self.group or depth), CHANNELS

    def of_inputs(self, ranges: Sequence[tuple[int, int]]) -> Quantization:
        """The same format for a linear over some of the inputs, (start, length): if a cut goes
        through groups, they become smaller, and if it goes through superblocks, their scales are
        separate."""
        edges = [number for one in ranges for number in one]
        cuts = self.scale == "superblock" and any(number % SUPERBLOCK for number in edges)
        return dataclasses.replace(
            self,
            group=math.gcd(self.group, *edges) if self.group else 0,
            scale="float32" if cuts else self.scale,
        )


def quantization_of(format: Format, channels: int, depth: int) -> Quantization | None:
    """The format for a weight of this shape; None if the op does not support the shape."""
    if depth % INPUTS or not channels * depth:
        return None
    if format == "int4":
        group = next(g for g in GROUPS if depth % g == 0)
        return Quantization(format=format, group=group, scale="bfloat16")
    return Quantization(format=format)


def whole_blocks(rows: Tensor) -> Tensor:
    """[N, ...] with the last row repeated until N is a multiple of 16."""
    missing = -len(rows) % CHANNELS
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def quantize(rows: Tensor, to: Quantization) -> tuple[Tensor, Tensor]:
    """Quantize rows [N, K] to (weight, scale), rounding to nearest.

    For int4, the scale maps a group's value of largest magnitude to -8, so that all sixteen values
    are used.
    """
    values = whole_blocks(rows).float().unflatten(1, (-1, to.group or rows.shape[1]))
    if to.format == "int4":
        extreme = values.gather(2, values.abs().argmax(2, keepdim=True))
        scale = extreme / -MIDDLES["int4"]
    else:
        largest = values.abs().amax(2, keepdim=True)
        scale = largest / (_FP8_MAX if to.format == "fp8" else 127)
    scale = scale.to(to.scale_dtype)
    q = (values / torch.where(scale == 0, 1, scale).float()).flatten(1)
    if to.format == "fp8":
        stored = q.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    elif to.format == "int8":
        stored = q.round().clamp(-127, 127).to(torch.int8)
    else:
        stored = (q.round() + MIDDLES["int4"]).clamp(0, 15).to(torch.uint8)
    return pack_weight(stored, to), pack_groups(scale[..., 0])


def pack_weight(q: Tensor, to: Quantization) -> Tensor:
    """Quantized values [N, K], with those of fewer than 8 bits as 0, 1, ... in uint8 -> the op's
    weight."""
    if to.format in ("int5", "int6"):
        return _pack_units(pack_bytes(q), to.format)
    shape = to.shape("weight", *q.shape)
    if _is_4_bit(to.format):
        pairs = q.contiguous().view(torch.int16)  # little-endian, as on all platforms of torch
        q = (pairs & 15 | pairs >> 4).to(torch.uint8)
    return pack_bytes(q).view(to.dtype).view(shape)


def _pack_units(lines: Tensor, format: Format) -> Tensor:
    """Lines of bytes [N / 16, K / 4, 64] -> [N / 16, units, bytes], as `_codes` reads them."""
    inputs, count = _UNITS[format]
    unit = lines.unflatten(1, (-1, inputs // LINE))
    own, last = unit[:, :, :count], unit[:, :, count:].unbind(2)
    if format == "int6":
        spare = [last[0] << 6, last[0] >> 2 << 6, last[0] >> 4 << 6]
    else:
        x, y, z = last
        spare = [x << 5, x >> 3 << 5 | z >> 3 << 7, y << 5, y >> 3 << 5 | z >> 4 << 7, z << 5]
    units: Tensor = own | torch.stack(spare, 2)
    return units.flatten(2)


def pack_bytes(stored: Tensor) -> Tensor:
    """The same for bytes [N, W] that hold one value each, or two with the low half first."""
    return _to_blocks(stored, LINE)


def pack_groups(groups: Tensor) -> Tensor:
    """[N, K / group], or words of superblocks, -> the op's scale, zero or minimum."""
    return _to_blocks(groups, 1)


def some_inputs(
    parts: Mapping[Part, Tensor],
    of: Quantization,
    to: Quantization,
    ranges: Sequence[tuple[int, int]],
) -> dict[Part, Tensor]:
    """The tensors for a linear over some of the inputs, from those of a weight in format `of`.

    ranges: (start, length), multiples of 32 and of the group size of `to`, which divides that of
    `of`; of 256 if `of` and `to` have superblocks.
    """
    own: dict[Part, Tensor] = {}
    for part, blocks in parts.items():
        if part == "weight":
            inputs = _per_line(blocks)
        elif of.scale == "superblock":
            supers = blocks.unflatten(1, (-1, Groups(of.group, of.minimum).words))
            pieces = [supers.narrow(1, start // SUPERBLOCK, n // SUPERBLOCK) for start, n in ranges]
            own[part] = torch.cat(pieces, 1).flatten(1, 2)
            continue
        elif to.group:
            inputs = to.group
            blocks = blocks.repeat_interleave(of.group // to.group, dim=1)
        else:  # one per channel
            own[part] = blocks
            continue
        pieces = [blocks.narrow(1, start // inputs, n // inputs) for start, n in ranges]
        own[part] = torch.cat(pieces, 1)
    return own


@quantized_linear.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    shapes = ((1,), 128, 48, "int4", 0), ((3,), 96, 32, "int4", 0), ((1, 2, 5), 256, 96, "int4", 0)
    wide = ((1,), 64, 48, "int8", 0), ((9,), 160, 16, "int8", 0), ((1, 4), 96, 64, "fp8", 0)
    many = ((40,), 96, 32, "fp8", 0), ((33,), 64, 48, "int8", 0), ((70,), 128, 80, "int4", 0)
    grouped = ((1,), 160, 32, "fp8", 32), ((9,), 256, 48, "fp8", 128), ((3,), 128, 16, "int8", 64)
    float32 = (((2,), 128, 48, "int4", 64),)
    # GGUF's smallest groups, with row counts for every way of multiplying
    small = [((rows,), 96, 48, name, 16) for name in ("int4", "int8") for rows in (1, 3, 7, 20, 40)]
    for rows, k, n, name, group in (*shapes, *wide, *many, *grouped, *float32, *small):
        format: Format = name  # type: ignore[assignment]
        to = quantization_of(format, n, k)
        assert to is not None
        weight, scale = quantize(torch.randn(n, k, generator=gen) * k**-0.5, to)
        zero = None
        if format == "int4" and n % 32 == 0:
            zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8).to(device)
        if group:  # scales as in checkpoints, in float32
            drawn = 0.5 + torch.rand(n // CHANNELS, k // group, CHANNELS, generator=gen)
            scale, zero = scale.float().abs().mean() * drawn, None
        bias = torch.randn(n, generator=gen).to(device, dtype) if n % 48 == 0 else None
        x = torch.randn(*rows, k, generator=gen).to(device, dtype)
        yield x, weight.to(device), scale.to(device), zero, bias
        if group and rows != (3,):  # float16, as in GGUF files
            yield x, weight.to(device), scale.half().to(device), zero, bias
        if format != "fp8" and zero is None:
            # as quantizers choose them: the values of a group are centered on zero
            spread = torch.randn(scale.shape, generator=gen).to(device)
            middle = 7.5 if format == "int4" else 0.0
            minimum = (spread - middle) * scale.to(device).float()
            yield x, weight.to(device), scale.float().to(device), None, bias, minimum
            yield x, weight.to(device), scale.half().to(device), None, bias, minimum.half()
    yield from _rounded_cases(gen, device, dtype)
    yield from _float8_cases(gen, device, dtype)
    yield from _superblock_cases(gen, device, dtype)
    yield from _packed_cases(gen, device, dtype)
    for count in (1, 3, 7, 20, 40):
        codes, exponents = mxfp4_draw(gen, 48, 96)
        bias = torch.randn(48, generator=gen).to(device, dtype)
        x = torch.randn(count, 96, generator=gen).to(device, dtype)
        yield x, codes.to(device), exponents.to(device), None, bias


_ROUNDED_ROWS = (1, 2, 3, 5, 13, 40)  # for every way of multiplying


def _rounded_cases(
    gen: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    drawn: tuple[tuple[Format, int, int], ...]
    drawn = (("int4", 96, 8), ("int4", 128, 8), ("int4", 96, 16), ("int8", 288, 16))
    for format, k, bits in drawn:
        to = quantization_of(format, 48, k)
        assert to is not None
        weight, scale = quantize(torch.randn(48, k, generator=gen) * k**-0.5, to)
        drawn_zero = torch.randint(0, 16, scale.shape, generator=gen, dtype=torch.uint8)
        zero = drawn_zero.to(device) if format == "int4" else None
        groups = (3, k // 16, CHANNELS)
        fine = (0.5 + torch.rand(groups, generator=gen)) * scale.float().abs().mean()
        minimum = (torch.randn(groups, generator=gen) - (7.5 if format == "int4" else 0)) * fine
        bias = torch.randn(48, generator=gen).to(device, dtype)
        for rows in _ROUNDED_ROWS:
            x = _uneven(gen, rows, k).to(device, dtype)
            yield x, weight.to(device), scale.to(device), zero, bias, None, bits
            yield x, weight.to(device), fine.to(device), None, None, minimum.to(device), bits
    codes, exponents = mxfp4_draw(gen, 48, 96)
    for rows in _ROUNDED_ROWS:
        x = _uneven(gen, rows, 96).to(device, dtype)
        yield x, codes.to(device), exponents.to(device), None, None, None, 16


def _uneven(gen: torch.Generator, rows: int, k: int) -> Tensor:
    """x with a group of zeros and one of a large value, which rounds the others coarsely."""
    x = torch.randn(rows, k, generator=gen)
    x[0, :40] = 0
    x[-1, 50] = 30
    return x


def _float8_cases(gen: torch.Generator, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for k, group in ((96, 0), (256, 128), (96, 32)):
        to = Quantization(format="fp8", group=group)
        weight, scale = quantize(torch.randn(48, k, generator=gen) * k**-0.5, to)
        bias = None if group == 128 else torch.randn(48, generator=gen).to(device, dtype)
        for rows in (1, 3, 20, 40):
            x = _uneven(gen, rows, k).to(device, dtype)
            yield x, weight.to(device), scale.to(device), None, bias, None, 8


def _superblock_cases(
    gen: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    for format, group, minimum, k in SUPERBLOCK_DRAWS:
        weight, scale = superblock_draw(gen, format, group, minimum, 48, k)
        bias = torch.randn(48, generator=gen).to(device, dtype) if group == 32 else None
        all_bits = (EXACT_BITS, 16, 8) if format in MIDDLES else (EXACT_BITS, 16)
        for rows in _ROUNDED_ROWS:
            x = _uneven(gen, rows, k).to(device, dtype)
            for bits in all_bits:
                yield x, weight.to(device), scale.to(device), None, bias, None, bits


def _packed_cases(gen: torch.Generator, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Q5_0, Q5_1, IQ4_NL, and Q6_K, IQ3_S and IQ2_S whose superblocks are cut apart, and NVFP4."""
    for format, group, scale_dtype in (
        ("int5", 32, torch.float16), ("int5", 96, torch.float32), ("int6", 16, torch.float32),
        ("iq4", 32, torch.float16), ("iq3_s", 32, torch.float32), ("iq2", 16, torch.float32),
        ("nvfp4", 16, torch.float32),
    ):  # fmt: skip
        to = Quantization(format=format, group=group)  # type: ignore[arg-type]
        weight = packed_draw(gen, to, 48, 288).to(device)
        fine = (0.5 + torch.rand(to.shape("scale", 48, 288), generator=gen)) / 16
        fine /= _size(to.format)
        scale = fine.to(device, scale_dtype)
        minimum = scale * -15.5 if format == "int5" else None
        for rows in _ROUNDED_ROWS:
            x = _uneven(gen, rows, 288).to(device, dtype)
            for bits in (EXACT_BITS, 16, 8) if format in MIDDLES else (EXACT_BITS, 16):
                yield x, weight, scale, None, None, None, bits
                if minimum is not None:
                    yield x, weight, scale, None, None, minimum, bits


# (format, group, minimum, K) of Q4_K, Q2_K, Q3_K, Q5_K, Q6_K, IQ4_XS, IQ3_S, IQ3_XXS, IQ2_XXS and
# IQ2_S
SUPERBLOCK_DRAWS: tuple[tuple[Format, int, bool, int], ...] = (
    ("int4", 32, True, 512),
    ("int4", 16, True, 256),
    ("int4", 16, False, 256),
    ("int5", 32, True, 256),
    ("int6", 16, False, 512),
    ("iq4", 32, False, 512),
    ("iq3_s", 32, False, 256),
    ("iq3_xxs", 32, False, 512),
    ("iq2", 32, False, 256),
    ("iq2", 16, False, 512),
    ("int8", 32, False, 256),
)


def superblock_draw(
    gen: torch.Generator, format: Format, group: int, minimum: bool, *size: int
) -> tuple[Tensor, Tensor]:
    """(weight, scale) of a random weight [..., N, K] with superblocks, for tests and benchmarks.
    Minimums center the values on about zero, as quantizers choose them."""
    to = Quantization(format=format, group=group, scale="superblock", minimum=minimum)
    codes = packed_draw(gen, to, *size)
    if format == "int8":
        codes = codes >> 2
    *blocks, words, lanes = to.shape("scale", *size)
    parts, shape = 2 if minimum else 1, (*blocks, size[-1] // SUPERBLOCK, lanes)
    middle = MIDDLES.get(format, 0.5) - 0.5
    factors = 0.5 + torch.rand(*shape, parts, generator=gen)
    factors /= 250 * _size(format)
    groups = *shape, SUPERBLOCK // group, parts
    steps = torch.randint(5, 16, groups, generator=gen, dtype=torch.int8)
    if minimum:
        factors[..., 1] *= -middle
    else:
        steps *= torch.randint(0, 2, groups, generator=gen, dtype=torch.int8) * 2 - 1
    bits = factors.half().view(torch.int16), steps.flatten(-2).view(torch.int16)
    return codes, torch.cat(bits, -1).mT.reshape(*blocks, words, lanes).contiguous()


def _size(format: Format) -> float:
    """About the largest value; a quarter of it for int8, as `superblock_draw` draws it."""
    return max(map(abs, TABLES[format])) if format in TABLES else MIDDLES.get(format, 32)


def packed_draw(gen: torch.Generator, to: Quantization, *size: int) -> Tensor:
    """A random weight [..., N, K] whose codes are all possible ones."""
    shape = to.shape("weight", *size)
    return torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8).view(to.dtype)


def mxfp4_draw(gen: torch.Generator, *size: int) -> tuple[Tensor, Tensor]:
    """(weight, scale) of a random weight [..., N, K], for tests and benchmarks."""
    to = Quantization(format="mxfp4", group=32, scale="exponent")
    shapes = to.shape("weight", *size), to.shape("scale", *size)
    codes = torch.randint(0, 256, shapes[0], generator=gen, dtype=torch.uint8)
    return codes, torch.randint(122, 126, shapes[1], generator=gen, dtype=torch.uint8)
