"""One weight of a quantized checkpoint: its stored tensors, and how it is read from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import powers_of_two
from llmc.weights.checkpoint import Readable, SomeOf, StoredTensor, staging
from llmc.weights.quantized import unpack
from llmc.weights.quantized.quantization_config import WeightScheme
from llmc.weights.quantized.unpack import LowBits

BYTE_SCALES = (torch.uint8, torch.float8_e8m0fnu)  # powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedScale:
    """Scales that are stored as codes of a table, with a scale for every `size` of them."""

    scale: StoredTensor
    table: StoredTensor
    size: int
    offset: float

    def of(self, codes: Tensor) -> Tensor:
        values = self.table.read()[codes.int()]
        scale = self.scale.read().repeat_interleave(self.size)[: len(values)]
        return values * scale + self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Values, in the order of memory, are codes of a table, with a scale for every `size`."""

    table: StoredTensor
    size: int
    nested: NestedScale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A weight stored in several tensors. `read()` dequantizes it to `dtype`.

    `block`: (channels, inputs) that share a scale. `whole_scale`: a factor, or divisor, of all
    scales. `transposed`: the parameter is [.., K, N].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: WeightScheme
    block: tuple[int, int]
    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None = None
    group_of: StoredTensor | None = None
    whole_scale: StoredTensor | None = None
    codes: Codes | None = None
    transposed: bool = False

    def read(self, out: Tensor | None = None) -> Tensor:
        """The dequantized weight, written into `out` if given."""
        if out is None:
            out = staging(self.shape, self.dtype)
        unpack.dequantize(self.low_bits(), out.mT if self.transposed else out)
        return out

    def equals(self, other: Readable) -> bool:
        return self is other

    def order(self) -> Tensor | None:
        """The order of inputs [K] in which those of each group are consecutive; None if they are.
        CheckpointError if groups have different numbers of inputs."""
        if self.group_of is None:
            return None
        groups = self.group_of.read()
        if _are_in_order(groups, self.block[1]):
            return None
        order = groups.argsort(stable=True)
        if not _are_in_order(groups[order], self.block[1]):
            raise CheckpointError(
                f"{self.group_of.name} has groups of other sizes than {self.block[1]} inputs"
            )
        return order

    def low_bits(self, part: SomeOf | None = None) -> LowBits:
        """The stored values, unpacked: channels first, one value per element. With `part`, only
        those values are read, but the scales of all."""
        layout, bits = self.scheme.layout, self.scheme.bits
        *experts, channels, depth = self.shape
        if self.transposed:
            channels, depth = depth, channels
        q = self.words(self.weight, None if layout == "bitnet" else part)
        scale = self.scale.read()
        zero = None if self.zero is None else self.zero.read()
        group_of = table = None
        if layout == "gptq":
            q, scale = unpack.unpack_gptq(q, bits), scale.T
            if zero is not None:
                if self.scheme.zeros_less_one and bits != 3:
                    zero = unpack.add_one(zero, bits)
                zero = unpack.unpack_columns(zero, bits)[:, :channels].T
                if self.scheme.zeros_less_one and bits == 3:  # written without borrows
                    zero = zero + 1 & 7
        elif layout == "awq":
            q, scale = unpack.unpack_awq(q), scale.T
            zero = None if zero is None else unpack.unpack_awq(zero)
        elif layout == "awq_gemv":  # groups are padded to whole words
            groups = depth // self.block[1]
            q, scale = unpack.unpack_columns(q, bits), scale[:, :groups]
            zero = None if zero is None else unpack.unpack_columns(zero, bits)[:, :groups]
        elif layout == "packed":
            q = unpack.unpack_columns(q, bits)
            q = q if part is not None and part.dim == 1 else q[:, :depth]
            if zero is None:
                q = unpack.centered(q, bits)
            else:
                rows = math.ceil(channels / self.block[0])
                zero = unpack.unpack_gptq(zero, bits).T[:rows]
        elif layout == "mxfp4":
            q, scale = unpack.unpack_e2m1(q.flatten(-2)), powers_of_two(scale)
        elif layout == "fp4":
            q = unpack.unpack_e2m1(q.view(torch.uint8))
        elif layout == "bnb4":
            assert self.codes is not None
            q = unpack.halves(q)[: channels * depth].view(channels, depth)
            table, nested = self.codes.table.read(), self.codes.nested
            scale = scale if nested is None else nested.of(scale)
            if self.block == (1, 1):  # blocks that end inside rows
                scale = scale.repeat_interleave(self.codes.size)[: q.numel()]
        elif layout == "bnb8":
            scale = scale.float() / 127
        elif layout == "bitnet":
            q = unpack.unpack_rows(q)
            q = q if part is None else part.of(q)
            scale = 1 / scale.float() if self.scheme.divides else scale
        elif bits == 4 and not self.scheme.is_float:  # "plain"
            q, zero = self._nibbles(q, zero)
        scale = self.numbers_of(scale)
        if self.group_of is not None:
            group_of = self._checked_groups(self.group_of.read(), scale.shape[-1])
        grid = (*experts, *grid_of(channels, depth, self.block))
        return LowBits(
            q=q,
            scale=scale.reshape(grid),
            zero=None if zero is None else zero.reshape(grid),
            block=self.block,
            group_of=group_of,
            table=table,
        )

    def numbers_of(self, scale: Tensor) -> Tensor:
        """Stored scales with the factor of the whole weight."""
        if scale.dtype in BYTE_SCALES:
            scale = powers_of_two(scale.view(torch.uint8))
        if self.whole_scale is not None:
            whole = self.whole_scale.read().float().reshape(())
            scale = scale.float() / whole if self.scheme.divides else scale.float() * whole
        return scale

    def _nibbles(self, q: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """4-bit integers in int8, checked; unsigned if they have zero points."""
        for stored, values in ((self.weight, q), (self.zero, zero)):
            if stored is not None and values is not None and bool(((values + 8) >> 4).any()):
                raise CheckpointError(
                    f"{stored.name} has values from {int(values.min())} to {int(values.max())}, "
                    "although quantization_config says that it has 4 bits"
                )
        if zero is None:
            return q, None
        return (q + 8).view(torch.uint8), (zero + 8).view(torch.uint8)

    def words(self, stored: StoredTensor, part: SomeOf | None) -> Tensor:
        """`part` of the tensor with the values, or, for mxfp4, with their exponents.

        Raises CheckpointError if the part starts or ends inside a stored element.
        """
        if part is None:
            return stored.read()
        dim, values = part.dim, 1  # values along `dim` that can't be separated
        per_word = 32 // math.gcd(32, self.scheme.bits)
        match self.scheme.layout:
            case "gptq":
                dim, values = (1, 1) if self._is_of_channels(part) else (0, per_word)
            case "awq":
                dim, values = (1, per_word) if self._is_of_channels(part) else (0, 1)
            case "packed" | "awq_gemv":
                values = 1 if self._is_of_channels(part) else per_word
            case "fp4":
                per_element = self.block[1] if stored is self.scale else 2
                values = 1 if self._is_of_channels(part) else per_element
            case "mxfp4":
                dim, values = (1, 1) if self._is_of_channels(part) else (2, self.block[1])
        elements = 3 if self.scheme.bits == 3 and values > 1 else 1  # that hold these values
        if any(n % values for pair in part.ranges for n in pair):
            held = "one stored element" if elements == 1 else f"{elements} stored elements"
            raise CheckpointError(
                f"{stored.name} can't be sharded among ranks at {part.ranges}, because {values} "
                f"values share {held}; serve on one rank, or dequantize with --quantization none"
            )
        at = (tuple(n // values * elements for n in pair) for pair in part.ranges)
        ranges = tuple((start, count) for start, count in at)
        return SomeOf(shape=stored.shape, dim=dim, ranges=ranges).take(stored)

    def _is_of_channels(self, part: SomeOf) -> bool:
        return (part.dim == len(self.shape) - 2) != self.transposed

    def places(self, part: SomeOf | None) -> tuple[Tensor, Tensor]:
        """The indices of the channels and inputs in `low_bits(part)`."""
        channels, depth = self.shape[:-3:-1] if self.transposed else self.shape[-2:]
        places = torch.arange(channels), torch.arange(depth)
        if part is None:
            return places
        some = torch.cat([torch.arange(start, start + n) for start, n in part.ranges])
        return (some, places[1]) if self._is_of_channels(part) else (places[0], some)

    def _checked_groups(self, groups: Tensor, count: int) -> Tensor | None:
        """The group of each input, checked; None if they are in order."""
        assert self.group_of is not None
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise CheckpointError(
                f"{self.group_of.name} names group {int(groups.max())}, but there are only {count}"
            )
        return None if _are_in_order(groups, self.block[1]) else groups.long()


def _are_in_order(groups: Tensor, size: int) -> bool:
    return torch.equal(groups.long(), torch.arange(len(groups)) // size)


def grid_of(channels: int, depth: int, block: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks along channels and inputs."""
    return math.ceil(channels / block[0]), math.ceil(depth / block[1])
