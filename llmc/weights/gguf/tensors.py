"""A parameter stored in GGUF files: dequantized, or its stored bits as blocks for an op."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from llmc.errors import CheckpointError, reason_of
from llmc.kernels.quantized_linear import CHANNELS, INPUTS, Part, Quantization, some_inputs
from llmc.weights.checkpoint import BlockTensor, BlockWriter, Readable, SomeOf, staging
from llmc.weights.gguf.blocks import RowOrder, fill_blocks, kept_as
from llmc.weights.gguf.processors import Processor, processor_of
from llmc.weights.gguf.reader import GgufTensorInfo

_AT_ONCE = 1 << 20  # values dequantized at a time
_PROBED = 4  # columns: enough to detect a change of their order (two groups of two)

_NUMBERS = ("F32", "F16", "BF16", "F64", "I32")  # types that are not quantized

# what converting a tensor raises that does not fit the metadata
_MISFITS = (ValueError, IndexError, KeyError, TypeError, RuntimeError, ZeroDivisionError)

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Undoes what a file's converter did to a model's tensors.

    transformers is imported only if more than a reordering of rows has to be undone.
    """

    architecture: str
    config: Mapping[str, Any]
    rule: Mapping[str, Any]

    @cached_property
    def processor(self) -> Processor:
        return processor_of(self.architecture, self.config, self.rule)

    def __call__(
        self, parts: Sequence[tuple[str, NDArray[Any]]], *, only_rows: bool = False
    ) -> NDArray[Any]:
        """The parameter made from its tensors, with the file's columns if `only_rows`.
        CheckpointError if their shapes don't fit."""
        try:
            with np.errstate(all="ignore"):  # NaN in a file stays NaN
                return self.processor.undo(parts, only_rows=only_rows)
        except _MISFITS as e:
            names = ", ".join(repr(name) for name, _ in parts)
            raise CheckpointError(f"tensor {names} has the wrong shape: {reason_of(e)}") from e

    def columns(self, name: str, depth: int) -> NDArray[np.int64] | None:
        """The stored column of each column of a matrix; None if they are in order. CheckpointError
        if their number does not fit."""
        try:
            return self.processor.columns(name, depth)
        except _MISFITS as e:
            raise CheckpointError(f"tensor {name!r} has the wrong shape: {reason_of(e)}") from e

    def order(
        self, parts: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
    ) -> tuple[NDArray[np.int64], bool, NDArray[np.int64] | None] | None:
        """If only rows and columns are reordered: the stored row of each row, whether it is
        transposed, and `columns`.

        For experts [E, N, K] or [E, K, N] this is the order within one expert, over its
        concatenated parts; for vectors, the order of their values. Columns are reordered of a
        single matrix alone. None if more than that is done, or if the experts differ.
        """
        if any(len(p) != len(shape) for p in parts.values()) or len(shape) > 3:
            return None
        experts = shape[0] if len(shape) == 3 else 1
        if any(len(p) == 3 and p[0] != experts for p in parts.values()):
            return None
        rows = {part: p[1] if len(p) == 3 else p[0] for part, p in parts.items()}
        count, start = sum(rows.values()), 0
        is_matrix = len(parts) == 1 and len(shape) == 2
        probes = []
        first = np.arange(experts, dtype=np.float64)[:, None] * count
        of_columns = np.arange(_PROBED)
        for part, length in rows.items():
            numbers = _PROBED * (first + np.arange(start, start + length))
            whole = numbers[..., None] + of_columns  # [E, rows, _PROBED]
            probes.append((part, {1: whole[0, :, 0], 2: whole[0], 3: whole}[len(shape)]))
            start += length
        try:
            moved = self(probes, only_rows=is_matrix)
        except CheckpointError:
            return None
        depths = {p[-1] for p in parts.values()}
        if len(shape) == 1 and moved.shape == shape:
            found, turned = moved[None], False
        elif moved.shape == (*shape[:-2], count, _PROBED) and shape[-2:] == (count, *depths):
            found, turned = moved.reshape(experts, count, _PROBED), False
        elif moved.shape == (*shape[:-2], _PROBED, count) and shape[-2:] == (*depths, count):
            found, turned = moved.swapaxes(-1, -2).reshape(experts, count, _PROBED), True
        else:
            return None
        numbers = found if len(shape) == 1 else found[:, :, 0]
        with np.errstate(all="ignore"):
            order = (numbers / _PROBED - first).astype(np.int64)
        is_alike = np.array_equal(order, np.broadcast_to(order[0], order.shape))
        is_order = np.array_equal(np.sort(order[0]), np.arange(count))
        if not is_alike or not is_order or not np.array_equal(numbers, _PROBED * (first + order)):
            return None
        if len(shape) > 1 and not np.array_equal(found, numbers[..., None] + of_columns):
            return None
        columns = self.columns(next(iter(parts)), shape[1]) if is_matrix else None
        return None if turned and columns is not None else (order[0], turned, columns)


@dataclass(frozen=True, kw_only=True)
class GgufTensor(BlockTensor):
    """A parameter, read in `dtype`. Several `parts` are matrices whose rows are concatenated.

    `row_order`: see `Undo.order`; for experts, the order within each. It is a slice if rows are not
    reordered, and None if `undo` does more than that. `transposed`: rows of the file are columns of
    the parameter. `columns`: see `Undo.columns`; never of a transposed one.
    """

    parts: tuple[GgufTensorInfo, ...]
    row_order: RowOrder | None
    undo: Undo
    transposed: bool = False
    columns: NDArray[np.int64] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(part.num_bytes for part in self.parts)

    def read(self, out: Tensor | None = None) -> Tensor:
        """The dequantized values, written into `out` (of any dtype) if given."""
        if out is None:
            out = staging(self.shape, self.dtype)
        if self.row_order is None:
            out.copy_(self._processed())
        elif len(self.shape) == 1:
            numbers = _widen(raw_rows(self.parts[0]), self.parts[0])[0][self.row_order]
            out.copy_(torch.from_numpy(numbers))
        else:
            for matrices, place in zip(self._matrices(), self._places(out), strict=True):
                self._widen_into(matrices, place)
        return out

    def _places(self, out: Tensor) -> Tensor:
        """A view of `out` as [E, N, K]."""
        stacked = out if out.dim() == 3 else out[None]
        return stacked.mT if self.transposed else stacked

    def _widen_into(self, matrices: list[NDArray[np.uint8]], place: Tensor) -> None:
        """Dequantize some rows at a time; several parts, whose types may differ, all at once."""
        order = self.row_order
        assert order is not None
        if len(matrices) > 1:
            pairs = zip(matrices, self.parts, strict=True)
            numbers = np.concatenate([_widen(raw, part) for raw, part in pairs])
            place.copy_(torch.from_numpy(numbers[order]))
            return
        columns = slice(None) if self.columns is None else self.columns
        [raw], rows = matrices, max(1, _AT_ONCE // place.shape[1])
        for start in range(0, len(raw), rows):
            some = slice(start, start + rows)
            chosen = raw[some] if isinstance(order, slice) else raw[order[some]]
            place[some].copy_(torch.from_numpy(_widen(chosen, self.parts[0])[:, columns]))

    def kept_as(self) -> Quantization | None:
        """The `quantized_linear` format with the same values; None if it must be dequantized."""
        to = self._stored_as()
        if to is None or self.columns is None:
            return to
        ranges = _ranges_of(self.columns)
        is_whole = all(n % INPUTS == 0 for one in ranges for n in one)
        return to.of_inputs(ranges) if is_whole else None

    def _stored_as(self) -> Quantization | None:
        """The same for the columns in the file's order."""
        kinds = {part.type for part in self.parts}
        if len(self.shape) < 2 or self.row_order is None or len(kinds) > 1:
            return None
        channels, depth = self.shape[:-3:-1] if self.transposed else self.shape[-2:]
        if len(self.shape) > 2 and channels % CHANNELS:
            return None
        to = kept_as(kinds.pop(), depth)
        return None if to is None else dataclasses.replace(to, transposed=self.transposed)

    @property
    def is_quantized(self) -> bool:
        return any(part.type.name not in _NUMBERS for part in self.parts)

    def write_blocks(self, to: Quantization, out: BlockWriter, part: SomeOf | None = None) -> None:
        """Write the stored bits of the tensor, or of a part, in the op's layout; of one expert
        after the other, if there are any."""
        order, inputs = self.row_order, None
        assert order is not None
        if part is not None and (part.dim == len(self.shape) - 2) == self.transposed:
            inputs = part.ranges
        elif part is not None:
            channels = np.arange(part.shape[part.dim])[order]
            order = np.concatenate([channels[start : start + n] for start, n in part.ranges])
        else:
            order = _whole_blocks(order, self.shape[-1] if self.transposed else self.shape[-2])
        if self.columns is not None:
            some = [(0, len(self.columns))] if inputs is None else inputs
            inputs = _ranges_of(
                np.concatenate([self.columns[start : start + n] for start, n in some])
            )
        for matrices in self._matrices():
            if inputs is not None:
                out.write(self._blocks_of_inputs(_joined(matrices), order, inputs, to))
                continue
            is_apart = isinstance(order, slice) and all(len(m) % CHANNELS == 0 for m in matrices)
            for rows in matrices if is_apart else (_joined(matrices),):
                count = len(rows if isinstance(order, slice) else order)  # whole blocks
                fill_blocks(rows, self.parts[0].type, to, out.next(count // CHANNELS), order)

    def _blocks_of_inputs(
        self,
        rows: NDArray[np.uint8],
        order: RowOrder,
        inputs: Sequence[tuple[int, int]],
        to: Quantization,
    ) -> dict[Part, Tensor]:
        """The blocks of these inputs, which may start and end inside a block of the file."""
        kind, whole = self.parts[0].type, self._stored_as()
        assert whole is not None
        whole = dataclasses.replace(whole, scale=to.scale)  # a cut through superblocks splits them
        size, num_bytes = GGML_QUANT_SIZES[kind]
        first = min(start for start, _ in inputs) // size
        end = -(-max(start + n for start, n in inputs) // size)
        own = rows[:, first * num_bytes : end * num_bytes]
        channels = len(rows if isinstance(order, slice) else order)
        made = {
            part: torch.empty(whole.shape(part, channels, (end - first) * size), dtype=dtype)
            for part, dtype in whole.dtypes.items()
        }
        fill_blocks(own, kind, whole, made, order)
        ranges = [(start - first * size, n) for start, n in inputs]
        return some_inputs(made, whole, to, ranges)

    def _matrices(self) -> Iterator[list[NDArray[np.uint8]]]:
        """For each expert, or the single matrix, the stored rows of its parts."""
        experts = self.shape[0] if len(self.shape) == 3 else 1
        of_parts = [raw_rows(part).reshape(experts, part.shape[-2], -1) for part in self.parts]
        for expert in range(experts):
            yield [raw[expert] for raw in of_parts]

    def _processed(self) -> Tensor:
        stored = [
            (part.name, _widen(raw_rows(part), part).reshape(part.shape)) for part in self.parts
        ]
        value = torch.from_numpy(np.array(self.undo(stored)))
        dims = len([n for n in self.shape if n != 1])
        if _merged(value.shape, dims) != _merged(self.shape, dims):
            raise CheckpointError(
                f"{self.name} has shape {list(value.shape)} in the file, but its metadata requires "
                f"{list(self.shape)}"
            )
        return value.reshape(self.shape)

    def equals(self, other: Readable) -> bool:
        return self is other


def _whole_blocks(order: RowOrder, rows: int) -> RowOrder:
    """The order with the last row repeated until whole blocks are full."""
    missing = -rows % CHANNELS
    return np.pad(np.arange(rows)[order], (0, missing), "edge") if missing else order


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNumber:
    """A parameter with a single value, which is stored in the metadata or implied."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float

    def read(self, out: Tensor | None = None) -> Tensor:
        """The value, written into `out` (of any dtype) if given."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        return out.fill_(self.value)

    def equals(self, other: Readable) -> bool:
        return self is other


def _merged(shape: Sequence[int], dims: int) -> list[int]:
    """Normalize a shape: files omit or add dimensions of size 1, and split the first into heads."""
    kept = [n for n in shape if n != 1]
    over = max(0, len(kept) - dims)
    return [math.prod(kept[: over + 1]), *kept[over + 1 :]]


def _ranges_of(columns: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """(start, length) of each run of consecutive numbers."""
    edges = [0, *(np.flatnonzero(np.diff(columns) != 1) + 1).tolist(), len(columns)]
    return tuple((int(columns[a]), b - a) for a, b in itertools.pairwise(edges))


def _joined(matrices: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return matrices[0] if len(matrices) == 1 else np.concatenate(matrices)


def read_matrix(info: GgufTensorInfo) -> Tensor:
    """A stored matrix in float32."""
    if len(info.shape) != 2:
        raise CheckpointError(f"tensor {info.name!r} is not a matrix")
    return read_values(info)


def read_values(info: GgufTensorInfo) -> Tensor:
    """A stored tensor in float32."""
    return torch.from_numpy(_widen(raw_rows(info), info).reshape(info.shape))


def raw_rows(info: GgufTensorInfo) -> NDArray[np.uint8]:
    """[rows, bytes per row], memory-mapped from the file."""
    try:
        data = np.memmap(info.file, np.uint8, "r", info.offset, (info.num_bytes,))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{info.file.name} ends inside tensor {info.name!r}") from e
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    return data.reshape(-1, info.shape[-1] // block * block_bytes)


def _widen(raw: NDArray[np.uint8], info: GgufTensorInfo) -> Floats:
    """[rows, bytes] -> [rows, values] in float32, dequantized by the gguf package."""
    if info.type is GGMLQuantizationType.I32:  # numbers of experts, which are exact in float32
        return raw.view(np.int32).astype(np.float32)
    try:
        with np.errstate(all="ignore"):
            numbers = dequantize(np.ascontiguousarray(raw), info.type)
            return np.require(numbers, np.float32, "W")  # float32 data is a view of the mapped file
    except NotImplementedError as e:
        raise CheckpointError(
            f"tensor {info.name!r} is stored as {info.type.name}, which the gguf package can't read"
        ) from e
