"""A parameter that lies in GGUF files: widened to numbers, or its bits as blocks of an op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from llmc.errors import CheckpointError, reason_of
from llmc.kernels.quantized_linear import Part, Quantization
from llmc.weights.checkpoint import Readable, staging
from llmc.weights.gguf.blocks import kept_as, to_blocks
from llmc.weights.gguf.names import processor_of
from llmc.weights.gguf.reader import GgufTensorInfo

_AT_ONCE = 1 << 20  # values that are widened in one go

Floats = NDArray[np.float32]
RowOrder = NDArray[np.int64] | slice


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Undoes what a file's converter did to a model's tensors, by transformers' processor.

    transformers is imported where that does more than to reorder rows.
    """

    architecture: str
    fields: Mapping[str, Any]  # of the config
    names: Mapping[str, str]  # tensor -> parameter

    @cached_property
    def processor(self) -> Any:
        return processor_of(self.architecture, self.fields)

    def __call__(
        self, weights: NDArray[Any], name: str, made: dict[str, Tensor]
    ) -> NDArray[Any] | None:
        """None where the result, or a part of it, was put into `made`."""
        try:
            with np.errstate(all="ignore"):  # NaN in a file stays NaN
                result = self.processor.process(
                    weights=weights,
                    name=name,
                    tensor_key_mapping=self.names,
                    parsed_parameters={"tensors": made},
                )
        except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as e:
            raise CheckpointError(f"tensor {name!r} has no fitting shape: {reason_of(e)}") from e
        return None if result.name is None else result.weights

    def row_order(self, name: str, shape: Sequence[int]) -> NDArray[np.int64] | None:
        """Which stored row each row of a matrix is, or each value of a vector, where these move and
        nothing else is done to them."""
        columns = np.arange(2 * shape[0], dtype=np.float64).reshape(-1, 2)
        if len(shape) == 1:
            columns = columns[:, 0]
        try:
            with np.errstate(all="ignore"):
                result = self.processor.process(
                    weights=columns,
                    name=name,
                    tensor_key_mapping={},
                    parsed_parameters={"tensors": {}},
                )
        except (ValueError, IndexError, KeyError, TypeError):
            return None
        moved = result.weights
        if result.name is None or moved.shape != columns.shape:
            return None
        first, firsts = (moved, columns) if len(shape) == 1 else (moved[:, 0], columns[:, 0])
        if not np.array_equal(np.sort(first), firsts):
            return None
        order = (first / 2).astype(np.int64)
        return order if np.array_equal(moved, columns[order]) else None

    def expert_order(
        self, parameter: str, parts: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
    ) -> NDArray[np.int64] | None:
        """The same of each expert of a parameter [E, N, K]: rows of its matrices end to end.

        None where experts are not alike.
        """
        experts = shape[0]
        if len(shape) != 3 or any(p[0] != experts or p[2] != shape[2] for p in parts.values()):
            return None
        count, start = sum(p[1] for p in parts.values()), 0
        made: dict[str, Tensor] = {}
        whole: Any = None
        first = np.arange(experts, dtype=np.float64)[:, None] * count
        for part, (_, rows, _) in parts.items():
            numbers = first + np.arange(start, start + rows)
            columns = np.stack((2 * numbers, 2 * numbers + 1), axis=-1)
            try:
                whole = self(columns, part, made)
            except CheckpointError:
                return None
            start += rows
        moved = made[parameter].numpy() if whole is None and parameter in made else whole
        if moved is None or moved.shape != (experts, shape[1], 2) or shape[1] != count:
            return None
        order = (moved[:, :, 0] / 2 - first).astype(np.int64)
        is_alike = np.array_equal(order, np.broadcast_to(order[0], order.shape))
        if not is_alike or not np.array_equal(moved[:, :, 1], moved[:, :, 0] + 1):
            return None
        found: NDArray[np.int64] = order[0]
        return found


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A parameter, read in `dtype`. `parts` are several where experts' matrices are joined.

    `row_order`: see `Undo`, of experts that of each; a slice where rows stay where they are, None
    where `undo` does more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[GgufTensorInfo, ...]
    row_order: RowOrder | None
    undo: Undo

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return sum(part.num_bytes for part in self.parts)

    def read(self, out: Tensor | None = None) -> Tensor:
        """The numbers; into `out` (of any dtype) when given."""
        if out is None:
            out = staging(self.shape, self.dtype)
        if len(self.shape) == 3 and self.row_order is not None:
            for matrices, place in zip(self._experts(), out, strict=True):
                pairs = zip(matrices, self.parts, strict=True)
                numbers = np.concatenate([_widen(raw, part) for raw, part in pairs])
                place.copy_(torch.from_numpy(numbers[self.row_order]))
        elif self.row_order is not None:
            raw, order = raw_rows(self.parts[0]), self.row_order
            if len(self.shape) == 1:
                out.copy_(torch.from_numpy(_widen(raw, self.parts[0])[0][order]))
                return out
            rows = max(1, _AT_ONCE // self.shape[1])
            for start in range(0, len(raw), rows):
                some = raw[start : start + rows]
                if not isinstance(order, slice):
                    some = raw[order[start : start + rows]]
                out[start : start + rows].copy_(torch.from_numpy(_widen(some, self.parts[0])))
        else:
            out.copy_(self._processed())
        return out

    def kept_as(self) -> Quantization | None:
        """How `quantized_linear` has it as it is stored; None where it has to be widened."""
        kinds = {part.type for part in self.parts}
        if len(self.shape) < 2 or self.row_order is None or len(kinds) > 1:
            return None
        return kept_as(kinds.pop(), *self.shape[-2:])

    @property
    def is_quantized(self) -> bool:
        return any(part.type.name not in ("F32", "F16", "BF16", "F64") for part in self.parts)

    def blocks(self, to: Quantization) -> Iterator[dict[Part, Tensor]]:
        """The stored bits in the op's layout: of each expert, if there are any."""
        assert self.row_order is not None
        kind = self.parts[0].type
        if len(self.shape) == 2:
            yield to_blocks(raw_rows(self.parts[0])[self.row_order], kind, to)
            return
        for matrices in self._experts():
            yield to_blocks(np.concatenate(matrices)[self.row_order], kind, to)

    def _experts(self) -> Iterator[list[NDArray[np.uint8]]]:
        """Of each expert the rows of its matrices, as they are stored."""
        of_parts = [raw_rows(part).reshape(self.shape[0], part.shape[1], -1) for part in self.parts]
        for expert in range(self.shape[0]):
            yield [raw[expert] for raw in of_parts]

    def _processed(self) -> Tensor:
        made: dict[str, Tensor] = {}
        whole: Floats | None = None
        for part in self.parts:
            numbers = _widen(raw_rows(part), part).reshape(part.shape)
            whole = self.undo(numbers, part.name, made)
        value = torch.from_numpy(np.array(whole)) if whole is not None else made.get(self.name)
        if value is None or tuple(value.shape) != self.shape:
            got = None if value is None else list(value.shape)
            raise CheckpointError(
                f"{self.name} has shape {got} in the file, its metadata asks for {list(self.shape)}"
            )
        return value

    def equals(self, other: Readable) -> bool:
        return self is other


def raw_rows(info: GgufTensorInfo) -> NDArray[np.uint8]:
    """[rows, bytes of a row], mapped from the file."""
    try:
        data = np.memmap(info.file, np.uint8, "r", info.offset, (info.num_bytes,))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{info.file.name} ends inside tensor {info.name!r}") from e
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    return data.reshape(-1, info.shape[-1] // block * block_bytes)


def _widen(raw: NDArray[np.uint8], info: GgufTensorInfo) -> Floats:
    """[rows, bytes] -> [rows, values] in float32, as the gguf package has them."""
    try:
        with np.errstate(all="ignore"):
            numbers = dequantize(np.ascontiguousarray(raw), info.type)
            return np.require(numbers, np.float32, "W")  # float32 ones are the mapped file itself
    except NotImplementedError as e:
        raise CheckpointError(
            f"tensor {info.name!r} is stored as {info.type.name}, which the gguf package can't read"
        ) from e
