"""The tensors of a safetensors checkpoint, read one at a time directly into their destination.

Headers are validated by the safetensors library. Data is read with plain file reads, never
memory-mapped, so that only used memory is resident.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import Part, Quantization
from llmc.weights.weight_files import PICKLED, files_of_weights, no_weights

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_LFS_POINTER = b"version https://git-lfs.github.com/"
_COMPARED_AT_ONCE = 4 << 20  # bytes
_READ_AT_ONCE = 16 << 20  # bytes of whole rows, of which a part or another dtype is needed


class Readable(Protocol):
    """A weight that can be read: a stored tensor, or one made up of several."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is read."""

    def read(self, out: Tensor | None = None) -> Tensor:
        """Read the weight, into `out` (contiguous, of the same shape and dtype) if given."""

    def equals(self, other: Readable) -> bool:
        """Whether both are the same; False if comparing them would take arithmetic."""


@dataclass(frozen=True, kw_only=True)
class BlockTensor(ABC):
    """A weight, read in `dtype`, that its file may store in quantized blocks.

    Each file format has its own class, so that only models in that format import its package.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    @abstractmethod
    def is_quantized(self) -> bool: ...

    @abstractmethod
    def read(self, out: Tensor | None = None) -> Tensor:
        """The dequantized values, written into `out` (of any dtype) if given."""

    @abstractmethod
    def equals(self, other: Readable) -> bool: ...

    @abstractmethod
    def kept_as(self) -> Quantization | None:
        """The `quantized_linear` format with the same values; None if it must be dequantized."""

    @abstractmethod
    def write_blocks(self, to: Quantization, out: BlockWriter, part: SomeOf | None = None) -> None:
        """Write the stored bits of the tensor, or of a part, in the op's layout; of one expert
        after the other, if there are any."""


class BlockWriter:
    """Fills the weight inputs of `quantized_linear` [..., N / 16, lines, bytes], from the first
    block of channels on, and the order of their inputs, if there is one."""

    def __init__(self, out: Mapping[Part, Tensor]) -> None:
        self._order = out.get("order")
        self._out = {p: tensor.flatten(0, -3) for p, tensor in out.items() if p != "order"}
        self._filled = 0  # blocks

    @property
    def is_done(self) -> bool:
        return self._filled == len(self._out["weight"])

    def next(self, count: int) -> dict[Part, Tensor]:
        """The next `count` blocks, which the caller fills."""
        start, self._filled = self._filled, self._filled + count
        return {part: tensor[start : self._filled] for part, tensor in self._out.items()}

    def write(self, made: Mapping[Part, Tensor]) -> None:
        """Copy blocks that were made elsewhere."""
        if self._order is not None:
            self._order.copy_(made["order"])
        for part, place in self.next(len(made["weight"])).items():
            place.copy_(made[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The location of one tensor in a file. `read()` copies it into memory."""

    name: str
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self, out: Tensor | None = None) -> Tensor:
        """The tensor in its stored dtype, written into `out` (contiguous, same size) if given."""
        if out is None:
            out = staging(self.shape, self.dtype)
        if self.num_bytes == 0:
            return out
        flat = out.view(-1).view(torch.uint8) if out.dim() else out.view(1).view(torch.uint8)
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.offset)
            view = flat.numpy().data
            done = 0
            while done < self.num_bytes:
                count = f.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{self.file.name} ends inside tensor {self.name!r}")
                done += count
        return out

    def rows(self, start: int, count: int) -> StoredTensor:
        """Some of its rows along the first dimension."""
        size = self.num_bytes // max(1, self.shape[0])
        shape = (count, *self.shape[1:])
        return replace(self, offset=self.offset + start * size, shape=shape)

    def equals(self, other: Readable) -> bool:
        """Whether both are the same, byte for byte."""
        if not isinstance(other, StoredTensor) or (self.shape, self.dtype) != (
            other.shape,
            other.dtype,
        ):
            return False
        with open(self.file, "rb", buffering=0) as f, open(other.file, "rb", buffering=0) as g:
            f.seek(self.offset)
            g.seek(other.offset)
            for start in range(0, self.num_bytes, _COMPARED_AT_ONCE):
                count = min(_COMPARED_AT_ONCE, self.num_bytes - start)
                if f.read(count) != g.read(count):
                    return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeOf:
    """(start, length) pairs along a dimension of a tensor of this shape, end to end."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: Tensor) -> Tensor:
        pieces = [tensor.narrow(self.dim, start, length) for start, length in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    @classmethod
    def rows(cls, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> SomeOf:
        return cls(shape=shape, dim=0, ranges=tuple(ranges))

    def of_joined(self, first: int, shape: tuple[int, ...]) -> SomeOf | None:
        """The part that falls into one of the matrices whose concatenated rows make up the whole:
        the one that starts at row `first`. None if they don't overlap."""
        rows = len(self.shape) - 2
        if self.dim > rows:
            return SomeOf(shape=shape, dim=1, ranges=self.ranges)
        ranges: Sequence[tuple[int, int]] = self.ranges
        if self.dim == rows:
            first %= self.shape[rows]  # of its expert
        else:  # whole experts
            ranges = [(s * self.shape[rows], n * self.shape[rows]) for s, n in ranges]
        edges = [(max(s, first), min(s + n, first + shape[0])) for s, n in ranges]
        own = tuple((start - first, end - start) for start, end in edges if start < end)
        return SomeOf(shape=shape, dim=0, ranges=own) if own else None

    def take(self, stored: StoredTensor) -> Tensor:
        """This part of a plain tensor, in its stored dtype."""
        length = sum(length for _, length in self.ranges)
        size = (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])
        out = staging(size, stored.dtype)
        self.read(stored, out)
        return out

    def read(self, stored: Readable, out: Tensor) -> None:
        """Read into `out`; a plain tensor some rows at a time, so that it is never whole in memory.

        A tensor stored in another form is first read whole, and then freed.
        """
        if not isinstance(stored, StoredTensor):
            out.copy_(self.of(stored.read()))
            return
        rows, at = max(1, _READ_AT_ONCE * self.shape[0] // max(1, stored.num_bytes)), 0
        for first, length in self.ranges if self.dim == 0 else ((0, self.shape[0]),):
            for start in range(first, first + length, rows):
                count = min(rows, first + length - start)
                some = stored.rows(start, count).read()
                out[at : at + count].copy_(some if self.dim == 0 else self.of(some))
                at += count


def staging(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor for temporary data, in its own memory pages, which are released when it is freed.

    With malloc, freed memory of this size would stay in the process as holes between the weights.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < mmap.PAGESIZE:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def open_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a directory: one model.safetensors, or else its shards, with an index or, if
    their names tell that they are all there, without.

    Raises CheckpointError for a missing, truncated or inconsistent file.
    """
    single = path / "model.safetensors"
    if single.is_file():
        return open_file(single)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _open_sharded(path, index)
    others = files_of_weights(path, "safetensors")
    if len(others) == 1:
        return open_file(path / others[0])
    if shards := _numbered_shards(others):
        return {n: t for file in shards for n, t in open_file(path / file).items()}
    if pickled := sorted(name for kind in PICKLED for name in files_of_weights(path, kind)):
        raise CheckpointError(
            f"{path.name!r} contains only pickled weights (such as {pickled[0]!r:.80}), none of "
            "them named pytorch_model*.bin; use a checkpoint in safetensors"
        )
    raise no_weights(path)


def _numbered_shards(names: Sequence[str]) -> list[str]:
    """The shards that are numbered as one set; [] if there is none, or more than one.

    Raises CheckpointError if a shard of the set is missing."""
    matches = [m for name in names if (m := _SHARD.fullmatch(name))]
    if len({(m[1], m[3]) for m in matches}) != 1:
        return []
    stem, _, count = matches[0].groups()
    found = [m[0] for m in matches]
    numbers = {int(m[2]) for m in matches}
    absent = next(n for n in itertools.count(1) if n not in numbers)
    if absent <= int(count):
        raise CheckpointError(
            f"shard {absent} of {int(count)} ({stem}-...) is missing, and so is "
            "model.safetensors.index.json; download the checkpoint again"
        )
    return found


def _open_sharded(path: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(f) for f in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{index.name} can't be read: {str(e)[:200]}") from e
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{index.name} names a file outside its directory: {name!r}")
        if not (path / name).is_file():
            raise CheckpointError(
                f"{index.name} names {name!r}, which is missing; download the checkpoint again"
            )
        tensors.update(open_file(path / name))
    missing = [n for n in weight_map if n not in tensors]
    if missing:
        raise CheckpointError(f"the index lists {', '.join(missing[:5])}, but no shard has them")
    return tensors


def open_file(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt"):
            pass  # the library checks header, offsets, overlaps and the file's size
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
    except (SafetensorError, OSError, ValueError) as e:
        if _is_lfs_pointer(file):
            raise CheckpointError(
                f"{file.name} is a Git LFS pointer instead of the weights; run `git lfs pull` in "
                "the model's directory"
            ) from e
        raise CheckpointError(
            f"{file.name} is not a complete safetensors file ({str(e)[:200]}); download it again"
        ) from e
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{file.name}: tensor {name!r} has dtype {entry['dtype']}, which is not supported"
            )
        tensors[name] = StoredTensor(
            name=name,
            file=file,
            offset=8 + size + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=dtype,
        )
    return tensors


def _is_lfs_pointer(file: Path) -> bool:
    """Whether it is what `git clone` leaves in place of a large file without Git LFS."""
    try:
        with open(file, "rb") as f:
            return f.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False
