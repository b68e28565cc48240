"""The header of a GGUF file: its metadata, and where its tensors are.

Nothing is trusted: every length is checked against the remaining bytes of the file before
anything is read or allocated. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llmc.errors import CheckpointError
from llmc.weights.gguf.files import MAGIC, PART, all_parts, around_number

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {  # type -> (struct format, bytes)
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_MAX_DIMS = 4
_LONGEST_LIST = 1 << 22  # values; vocabularies have a quarter of a million
_LONGEST_TEXT = 1 << 26  # bytes
_LONGEST_NAME = 65535  # bytes, of a key or a tensor; the format's limit for a key


# What a file is if not a model, by general.type or general.architecture, and what to do.
_OTHERS = {
    "mmproj": ("the image or audio encoder of a model", "name the file of the language model"),
    "imatrix": ("an importance matrix, which is used to quantize a model", "name the model's file"),
    "adapter": (
        "an adapter",
        "name the file of the model that it is for, with --lora-modules NAME=FILE",
    ),
    "controlvector": ("a control vector, which llmc does not support", "name the model's file"),
}
_OTHERS["clip"] = _OTHERS["mmproj"]  # older ones state only the architecture
_KINDS = ("general.architecture", "general.type")


def shown(value: object) -> str:
    """A value for an error message, truncated: files contain text and lists of any length."""
    text = repr(value[:80] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensorInfo:
    """One tensor. `shape` is in torch's order, `offset` in bytes from the start of `file`."""

    name: str
    file: Path
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The combined header of a model's files; there are several if it is split."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensorInfo]

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"{self.files[0].name} does not state its architecture (general.architecture)"
            )
        return name


def read_header(path: Path) -> GgufHeader:
    """Read a model's header. CheckpointError if it is truncated, inconsistent or not a GGUF file.

    Given the first part of a split model, reads the others too, which must be next to it.
    """
    files = _parts(path)
    metadata, tensors = _read_file(files[0])
    if described := _other_kind(metadata):
        what, advice = described
        raise CheckpointError(f"{files[0].name} is {what}, and not a model; {advice}")
    number = metadata.get("split.no")
    if type(number) is int and number != 0:
        raise CheckpointError(
            f"{files[0].name} holds part {number + 1} of a split model, by what it says itself; "
            "name its first part"
        )
    for other in files[1:]:
        for name, tensor in _read_file(other)[1].items():
            if name in tensors:
                raise CheckpointError(
                    f"{other.name} repeats tensor {shown(name)} of an earlier part"
                )
            tensors[name] = tensor
    stated = metadata.get("split.tensors.count")
    if isinstance(stated, int) and stated != len(tensors):
        raise CheckpointError(
            f"{files[0].name} and its parts have {len(tensors)} tensors instead of {stated}"
        )
    return GgufHeader(files=files, metadata=metadata, tensors=tensors)


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensorInfo]]:
    """The metadata and tensors of a LoRA adapter. CheckpointError if the file is another kind."""
    metadata, tensors = _read_file(path)
    kinds = {key: metadata.get(key) for key in ("general.type", "adapter.type")}
    if tuple(kinds.values()) != ("adapter", "lora"):
        stated = ", ".join(f"{key} is {shown(kind)}" for key, kind in kinds.items())
        raise CheckpointError(f"{path.name} is not a LoRA adapter: {stated}")
    return metadata, tensors


def is_other_file(path: Path) -> bool:
    """Whether a GGUF file is readable and states that it is something else than a model."""
    try:
        with _mapped(path) as data:
            return _other_kind(_Cursor(path, data).kinds()) is not None
    except CheckpointError:
        return False


def _other_kind(metadata: dict[str, Any]) -> tuple[str, str] | None:
    stated = (metadata.get(key) for key in _KINDS)
    return next(
        (_OTHERS[kind] for kind in stated if isinstance(kind, str) and kind in _OTHERS), None
    )


def _parts(path: Path) -> tuple[Path, ...]:
    part = PART.fullmatch(path.name)
    if part is None:
        return (path,)
    count = int(part["count"])
    if count < 1 or int(part["number"]) != 1:
        raise CheckpointError(
            f"{path.name} is part {int(part['number'])} of a split model; name its first part"
        )
    present = {file.name for file in all_parts(path)}
    before, after = around_number(part)
    names = (f"{before}{i:05d}{after}" for i in range(1, count + 1))
    files = []
    for name in names:
        if name not in present:
            raise CheckpointError(f"{path.name} is split, and its part {name} is missing")
        files.append(path.with_name(name))
    return tuple(files)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensorInfo]]:
    with _mapped(path) as data:
        return _Cursor(path, data).read()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path.name} is too short for a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path.name} can't be read: {e}") from e


class _Cursor:
    """Reads a header sequentially."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._size = len(data)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensorInfo]]:
        count, pairs = self._counts()
        metadata: dict[str, Any] = {}
        for key, value in self._metadata(pairs):
            if key in metadata:
                self._fail(f"has metadata {shown(key)} twice")
            metadata[key] = value
        entries = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
            self._fail(f"has alignment {shown(alignment)}, which is not a power of two up to 2^20")
        start = -(-self._at // alignment) * alignment
        return metadata, self._placed(entries, start, alignment)

    def kinds(self) -> dict[str, Any]:
        """What the file says it is. Reading ends where the vocabulary begins, which is long."""
        _, pairs = self._counts()
        before = takewhile(lambda pair: not pair[0].startswith("tokenizer."), self._metadata(pairs))
        return {key: value for key, value in before if key in _KINDS}

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata entries."""
        if self._data[:4] != MAGIC:
            self._fail("does not begin with the magic number of a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            kind = "is big-endian" if swapped in _VERSIONS else f"is of GGUF version {version}"
            self._fail(f"{kind}; llmc supports little-endian files of versions 2 and 3")
        count, pairs = self._scalar("Q"), self._scalar("Q")
        self._expect(count, 24, "tensors")  # a name's length, a size, a type and an offset
        self._expect(pairs, 13, "metadata entries")
        return count, pairs

    def _metadata(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self._string(_LONGEST_NAME, "a key")
            yield key, self._value(key)

    def _value(self, key: str) -> Any:
        kind = self._scalar("I")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind][0])
        if kind == _STRING:
            return self._string(_LONGEST_TEXT, key)
        if kind != _ARRAY:
            self._fail(f"has metadata {shown(key)} of unknown type {kind}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            letter, width = _SCALARS[kind]
            self._expect(count, width, f"values of {shown(key)}")
            values = struct.unpack_from(f"<{count}{letter}", self._data, self._at)
            self._at += count * width
            return list(values)
        if kind != _STRING:
            self._fail(f"has an array {shown(key)} of unreadable type {kind}")
        self._expect(count, 8, f"strings of {shown(key)}")
        return [self._string(_LONGEST_TEXT, key) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(_LONGEST_NAME, "a tensor's name")
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            self._fail(f"tensor {shown(name)} has {dims} dimensions instead of 1 to {_MAX_DIMS}")
        shape = tuple(self._scalar("Q") for _ in range(dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensorInfo]:
        tensors: dict[str, GgufTensorInfo] = {}
        for name, shape, type_number, offset in entries:
            if name in tensors:
                self._fail(f"has tensor {shown(name)} twice")
            try:
                kind = GGMLQuantizationType(type_number)
                block, block_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                self._fail(
                    f"tensor {shown(name)} has type {type_number}, which this version of the gguf "
                    "package does not know"
                )
            if 0 in shape or shape[-1] % block:
                self._fail(
                    f"tensor {shown(name)} has shape {list(shape)}, whose rows are not whole "
                    f"blocks of {block} values ({kind.name})"
                )
            num_bytes = block_bytes
            for n in (*shape[:-1], shape[-1] // block):
                num_bytes *= n
            if offset % alignment:
                self._fail(f"tensor {shown(name)} is at offset {offset}, which is not aligned")
            if num_bytes > self._size or start + offset + num_bytes > self._size:
                self._fail(
                    f"tensor {shown(name)} would end at byte {start + offset + num_bytes}, but the "
                    f"file has {self._size}: it is truncated or damaged"
                )
            tensors[name] = GgufTensorInfo(
                name=name, file=self._path, shape=shape, type=kind, offset=start + offset,
                num_bytes=num_bytes,
            )  # fmt: skip
        ordered = sorted(tensors.values(), key=lambda t: t.offset)
        for one, two in zip(ordered, ordered[1:], strict=False):
            if one.offset + one.num_bytes > two.offset:
                self._fail(f"tensors {shown(one.name)} and {shown(two.name)} overlap")
        return tensors

    def _scalar(self, letter: str) -> Any:
        width = struct.calcsize(f"<{letter}")
        if self._at + width > self._size:
            self._fail("ends inside its header: it is truncated")
        (value,) = struct.unpack_from(f"<{letter}", self._data, self._at)
        self._at += width
        return value

    def _string(self, longest: int, what: str) -> str:
        length = self._scalar("Q")
        if length > longest or self._at + length > self._size:
            self._fail(
                f"states {length} bytes for the text of {shown(what)}, more than it can contain"
            )
        self._at += length
        # Descriptions can be anyone's text, cut off at some byte; everything else is looked up.
        errors = "replace" if what.startswith("general.") else "strict"
        try:
            return self._data[self._at - length : self._at].decode("utf-8", errors)
        except UnicodeDecodeError as e:
            self._fail(f"has invalid UTF-8 in the text of {shown(what)} ({e.reason})")

    def _expect(self, count: int, width: int, what: str) -> None:
        """Check that there is room for `count` items of at least `width` bytes."""
        if count * width > self._size - self._at:
            self._fail(f"states {count} {what}, more than its {self._size} bytes can contain")
        if count > _LONGEST_LIST:
            self._fail(f"states {count} {what}, more than any model has ({_LONGEST_LIST})")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path.name} {problem}")
