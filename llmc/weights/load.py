"""Recipes -> tensors: creates each weight once, in its final form, from a checkpoint or random."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError
from llmc.kernels.cpu.pages import HugePages
from llmc.kernels.quantized_linear import (
    CHANNELS,
    Part,
    Quantization,
    quantization_of,
    quantize,
    some_inputs,
    take_channels,
)
from llmc.passes.inputs import FUNCTIONS, Shard, WeightInput
from llmc.weights.assignment import Assignment
from llmc.weights.checkpoint import (
    BlockTensor,
    BlockWriter,
    Readable,
    SomeOf,
    StoredTensor,
    staging,
)
from llmc.weights.parameters import Parameters, mean_of
from llmc.weights.quantized.config_fields import WAY_OUT
from llmc.weights.quantized.kept_quantized import blocks_of
from llmc.weights.quantized.quantized_tensor import QuantizedTensor
from llmc.weights.quantized.stored_shapes import plain_name

log = logging.getLogger(__name__)
Stored = TypeVar("Stored", bound=Readable)

# Drawing random values is slower than loading, so they repeat. A prime, so that no rows are equal.
_MAX_DRAWN = 262_139
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Suffixes of the names of low-bit tensors.
_PACKED = (".qweight", ".weight_packed", ".W_q", ".weight._data", ".weight._data._data")
_ROUNDED = 2**-7  # tolerance for a table stored in bfloat16


class WeightSource(Protocol):
    """Provides the model's parameters by name."""

    is_thread_safe: bool  # several threads may read parameters at once

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        """Write parameter `name`, or this part of it, into `out`, casting to its dtype."""

    def reads_rows(self, name: str) -> bool:
        """Whether `fill` reads rows of parameter `name` from a file without the others."""

    def write_blocks(
        self, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None = None
    ) -> None:
        """Write parameter `name`, or this part of it, as stored, in the layout of
        `quantized_linear`, expert by expert."""

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless every parameter exists with the right shape."""


class DummyWeights:
    """Random weights that depend only on the parameter's name and the seed.

    `stacks`: for a parameter that stacks experts, the number of channels of each part of every
    expert, by name. It is made of them, so that it equals those of a model without the stack.
    """

    is_thread_safe = True

    def __init__(
        self, seed: int, stacks: Mapping[str, Sequence[Mapping[str, int]]] | None = None
    ) -> None:
        self.seed = seed
        self._stacks = stacks or {}

    def check(self, names: Iterable[str]) -> None:
        """Every name exists."""

    def reads_rows(self, name: str) -> bool:
        return False

    def write_blocks(
        self, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None = None
    ) -> None:
        raise AssertionError("without a checkpoint no weight is stored quantized")

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        if part is not None:
            whole = staging(part.shape, out.dtype)
            self.fill(name, whole)
            out.copy_(part.of(whole))
            return
        if name in self._stacks:
            for expert, parts in zip(out, self._stacks[name], strict=True):
                pieces = expert.split([*parts.values()]) if len(parts) > 1 else [expert]
                for of, own in zip(parts, pieces, strict=True):
                    self.fill(of, own)
            return
        gen = torch.Generator(device=out.device)
        # 32 bits: the CPU's generator ignores the rest
        gen.manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        if out.dim() >= 2:
            width = 0.02 * 3**0.5  # the uniform distribution of standard deviation 0.02
            drawn = out.view(-1)[:_MAX_DRAWN].uniform_(-width, width, generator=gen)
            _repeat(drawn, out.view(-1))
        elif name.endswith("bias"):
            out.zero_()
        else:
            out.fill_(1.0)


def _repeat(drawn: Tensor, flat: Tensor) -> None:
    """Fill `flat`, which begins with `drawn`, with two copies, as each waits for all threads."""
    times = flat.numel() // max(1, len(drawn))
    flat[: times * len(drawn)].view(times, len(drawn))[1:].copy_(drawn)
    rest = flat[times * len(drawn) :]
    rest.copy_(drawn[: len(rest)])


def check_tables(source: DirectWeights | CheckpointWeights, tables: Mapping[str, float]) -> None:
    """Raise CheckpointError if a table in the checkpoint (`parameters.py`) differs from the one
    computed from its config, since the checkpoint's would not be used."""
    for name, mean in tables.items():
        for stored in source.stored(name):
            found = mean_of(stored.read())
            same = found == mean  # a mask's mean is -inf
            if not same and not abs(found - mean) <= _ROUNDED * abs(mean):
                raise CheckpointError(
                    f"the checkpoint's {name} (mean {found:.6g}) differs from the one computed "
                    f"from its config.json ({mean:.6g}), which llmc uses: use the config.json "
                    "that it was trained with"
                )


class DirectWeights:
    """A checkpoint whose tensors are the parameters, name by name."""

    is_thread_safe = True

    def __init__(self, parameters: Parameters, tensors: Mapping[str, Readable]) -> None:
        self._parameters = parameters
        self._tensors = tensors

    def _find(self, name: str) -> Readable | None:
        aliases = self._parameters.aliases.get(name, (name,))
        return next((self._tensors[a] for a in aliases if a in self._tensors), None)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether every parameter exists with its shape."""
        shapes = self._parameters.shapes
        found = [(n, self._find(n)) for n in names]
        return all(
            t is not None and t.shape == shapes[n] and not _takes_scales(t) for n, t in found
        )

    def check(self, names: Iterable[str]) -> None:
        missing = [n for n in names if not self.covers((n,))]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no tensors of the right shape for {', '.join(missing[:5])}"
            )

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        stored = self._find(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint has no tensor for {name}")
        _copy(stored, out, part)

    def reads_rows(self, name: str) -> bool:
        return isinstance(self._find(name), StoredTensor)

    def stored(self, name: str) -> tuple[Readable, ...]:
        """The stored tensor of a parameter; () if there is none."""
        found = self._find(name)
        return () if found is None else (found,)

    def write_blocks(
        self, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None = None
    ) -> None:
        _write_blocks(self._find(name), name, to, out, part)


class CheckpointWeights:
    """Parameters of `module` from a checkpoint's tensors.

    Raises CheckpointError, with the first five names, for parameters that are missing or have the
    wrong shape. Tensors that the module does not use are logged.
    """

    is_thread_safe = False  # what a conversion makes is kept until it is asked for

    def __init__(self, module: nn.Module, tensors: Mapping[str, Readable]) -> None:
        self._from = Assignment(module, tensors)
        self._converted: dict[str, Tensor] = {}  # already converted, not requested yet
        self._plain: dict[str, list[StoredTensor]] = {}  # see `_joined`
        if unexpected := self._from.unexpected:
            log.warning(
                "%d tensors of the checkpoint are not used by the model: %s",
                len(unexpected),
                ", ".join(unexpected[:5]),
            )

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless every parameter exists with the right shape."""
        problems = []
        for name in names:
            stored = self._from.find(name)
            bare = [t for t in self._from.made_of(name) if _takes_scales(t)]
            if bare:
                problems.append(
                    f"{name} is stored in {plain_name(bare[0].dtype)}, which no "
                    "quantization_config describes"
                )
            elif stored is None and self._from.convertible(name) is None:
                problems.append(f"{name} is missing")
            elif stored is not None and stored.shape != self._from.shapes[name]:
                problems.append(
                    f"{name} has shape {list(stored.shape)} instead of "
                    f"{list(self._from.shapes[name])}"
                )
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            if packed := [n for n in self._from.unexpected if n.endswith(_PACKED)]:
                found = f"{packed[0]} is of a quantization that config.json does not describe"
                more += f"; {found}; {WAY_OUT}"
            raise CheckpointError(
                f"the checkpoint does not fit its config.json: {'; '.join(problems[:5])}{more}"
            )

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        stored = self._from.find(name)
        if stored is not None:
            _copy(stored, out, part)
            return
        if (joined := self._joined(name)) and out.is_contiguous():
            _copy_joined(joined, out, part)
            return
        alias = self._from.convertible(name)
        if alias is None:
            raise CheckpointError(f"the checkpoint has no tensor for {name}")
        if alias not in self._converted:
            self._converted |= self._from.convert(alias)
        value = self._converted.pop(alias, None)
        wanted = tuple(out.shape) if part is None else part.shape
        if value is None or tuple(value.shape) != wanted:
            got = None if value is None else list(value.shape)
            raise CheckpointError(
                f"{name} has shape {got} after conversion, but config.json requires {list(wanted)}"
            )
        out.copy_(value if part is None else part.of(value))

    def reads_rows(self, name: str) -> bool:
        return isinstance(self._from.find(name), StoredTensor) or bool(self._joined(name))

    def _joined(self, name: str) -> list[StoredTensor]:
        """The plain tensors whose rows make up a parameter, such as those of its experts; [] if it
        is stored whole, or made in another way."""
        if name not in self._plain:  # asked for again for each expert
            joined = () if self._from.find(name) is not None else self._from.joined(name)
            plain = [stored for stored in joined if isinstance(stored, StoredTensor)]
            self._plain[name] = plain if len(plain) == len(joined) else []
        return self._plain[name]

    def stored(self, name: str) -> tuple[Readable, ...]:
        """The stored tensors of a parameter that stays quantized."""
        found = self._from.find(name)
        return self._from.joined(name) if found is None else (found,)

    def write_blocks(
        self, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None = None
    ) -> None:
        found = self._from.find(name)
        joined = () if found is not None else self._from.joined(name)
        if not joined:
            _write_blocks(found, name, to, out, part)
            return
        for stored, own in _overlapping(joined, part):
            _write_blocks(stored, name, to, out, own)


def _takes_scales(stored: Readable) -> bool:
    """Whether it is a weight in 8 bits as it lies in the file: its numbers mean nothing alone."""
    is_matrix = isinstance(stored, StoredTensor) and len(stored.shape) > 1
    return is_matrix and stored.dtype in _BYTES


def _copy(stored: Readable, out: Tensor, part: SomeOf | None = None) -> None:
    if part is not None:
        part.read(stored, out)
        return
    if isinstance(stored, BlockTensor) and tuple(out.shape) == stored.shape:
        stored.read(out)  # piece by piece, whatever its dtype
        return
    straight = stored.dtype == out.dtype and out.is_contiguous() and out.device.type == "cpu"
    if straight and tuple(out.shape) == stored.shape:
        stored.read(out)
    elif stored.shape and tuple(out.shape) == stored.shape:
        SomeOf.rows(stored.shape, [(0, stored.shape[0])]).read(stored, out)
    else:
        out.copy_(stored.read())


def _copy_joined(joined: Sequence[StoredTensor], out: Tensor, part: SomeOf | None) -> None:
    """Read the rows of all of these into `out`, one tensor at a time."""
    rows, at = out.view(-1, out.shape[-1]), 0
    for stored, own in _overlapping(joined, part):
        count = stored.shape[0] if own is None or own.dim else sum(n for _, n in own.ranges)
        _copy(stored, rows[at : at + count], own)
        at += count


def _overlapping(
    joined: Sequence[Stored], part: SomeOf | None
) -> Iterator[tuple[Stored, SomeOf | None]]:
    """Those of the tensors whose concatenated rows are a parameter into which a part of it falls,
    each with what of it does; None: all of it."""
    starts = [0, *itertools.accumulate(stored.shape[0] for stored in joined)]
    first, last = 0, len(joined)
    if part is not None and part.dim == 0:  # few of them, if it is one expert of many
        size = math.prod(part.shape[1:-1])  # rows of an expert; of a matrix, 1
        first = bisect.bisect_right(starts, size * min(start for start, _ in part.ranges)) - 1
        last = bisect.bisect_left(starts, size * max(start + n for start, n in part.ranges))
    for stored, start in zip(joined[first:last], starts[first:last], strict=True):
        own = None if part is None else part.of_joined(start, stored.shape)
        if part is None or own is not None:
            yield stored, own


def _write_blocks(
    stored: Readable | None, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None
) -> None:
    if isinstance(stored, BlockTensor):
        stored.write_blocks(to, out, part)
    elif isinstance(stored, QuantizedTensor):
        for made in blocks_of(stored, to, part):
            out.write(made)
    else:
        raise CheckpointError(f"the checkpoint has no quantized tensors for {name}")


def make_weights(
    role: WeightInput,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    memory: HugePages,
    rank: int = 0,
) -> dict[WeightInput, Tensor]:
    """Create the weight of one recipe and those read together with it: a quantized one's scales.

    `dtype` is the parameters' dtype, from which weights are quantized. `rank` selects the shard of
    a sharded weight.
    """
    if role.first_rank and rank:
        return {role: memory.empty(_shape(role, shapes), dtype).zero_()}
    if role.quantized is None:
        return {role: make_weight(role, shapes, dtype, source, memory, rank=rank)}
    to, plain = role.quantized.to, dataclasses.replace(role, quantized=None, order=())
    size = _shape(plain, shapes)
    if to.transposed:
        size = (*size[:-2], size[-1], size[-2])
    out = {part: memory.empty(to.shape(part, *size), kind) for part, kind in to.dtypes.items()}
    writer = BlockWriter(out)
    if role.quantized.kept:
        for name, shard in role.pieces:
            source.write_blocks(name, to, writer, _some_of(shard, shapes[name], False, rank))
    else:
        for made in _quantized(plain, to, shapes, dtype, source, memory, rank):
            writer.write(made)
    assert writer.is_done, f"not all blocks of {role.parts} are filled"
    if role.order:
        rows = _rows(role).to(memory.device)
        for part, blocks in out.items():
            if part != "order":
                blocks.copy_(take_channels(blocks, rows))
    return {
        dataclasses.replace(role, quantized=dataclasses.replace(role.quantized, part=part)): tensor
        for part, tensor in out.items()
    }


def _computed(
    role: WeightInput,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    memory: HugePages | None,
    rank: int,
) -> Tensor:
    """A plain recipe's weight with its rows in another order, and functions applied to it."""
    plain = dataclasses.replace(role, order=(), functions=())
    read = getattr(torch, role.functions[0]) if role.functions else dtype
    made = make_weight(plain, shapes, read, source, None if role.order else memory, rank=rank)
    if role.order:
        made = made.index_select(0, _rows(role))
        if memory is not None:
            made = memory.empty(made.shape, read).copy_(made)
    for name in role.functions:
        made = FUNCTIONS[name](made) if name in FUNCTIONS else made.to(getattr(torch, name))
    return made


def _rows(role: WeightInput) -> Tensor:
    """The numbers of the rows that a recipe keeps, in its order."""
    return torch.cat([torch.arange(first, first + length) for first, length in role.order])


def _quantized(
    role: WeightInput,
    to: Quantization,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    memory: HugePages,
    rank: int,
) -> Iterator[dict[Part, Tensor]]:
    """Blocks of some channels at a time, quantized here."""
    for piece in _whole_blocks(role, shapes):
        inputs = _of_inputs(piece, to, shapes)
        if inputs is not None:  # scales are computed over all inputs
            piece = dataclasses.replace(piece, shards=())
        for rows in _matrices(piece, shapes, dtype, source, rank):
            channels_first = rows.T if to.transposed else rows
            depth = channels_first.shape[1]
            whole = to if inputs is None else quantization_of(to.format, CHANNELS, depth)
            assert whole is not None, "otherwise the weight would be plain"
            for some in channels_first.split(_rows_at_once(depth)):
                weight, scale = quantize(some.to(memory.device), whole)
                parts: dict[Part, Tensor] = {"weight": weight, "scale": scale}
                if inputs is not None:
                    parts = some_inputs(parts, whole, to, inputs.ranges(rank))
                yield parts


def _matrices(
    role: WeightInput,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    rank: int,
) -> Iterator[Tensor]:
    """A plain recipe's weight: [N, K] some rows at a time, [E, N, K] expert by expert.

    If the source reads them alone, the whole is never in memory.
    """
    (name, shard), *more = role.pieces
    is_computed = more or role.transposed or role.functions
    along = 0 if shard is None else shard.dim
    if is_computed or along != 0 or not source.reads_rows(name):
        made = make_weight(role, shapes, dtype, source, None, rank=rank)
        yield from made if made.dim() == 3 else (made,)
        return
    (size,) = _sizes(role, shapes)
    held = [(0, size[0])] if shard is None else shard.ranges(rank)
    step = 1 if len(size) == 3 else _rows_at_once(size[-1])
    for first in range(0, size[0], step):
        count = min(step, size[0] - first)
        some = staging((count, *size[1:]), dtype)
        source.fill(name, some, SomeOf.rows(shapes[name], _cut(held, first, count)))
        yield from some if len(size) == 3 else (some,)


def _cut(ranges: Iterable[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """The ranges (start, length) of `count` of the elements in `ranges`, from number `first` on."""
    found = []
    for start, length in ranges:
        begin, end = max(first, 0), min(first + count, length)
        if begin < end:
            found.append((start + begin, end - begin))
        first -= length
    return found


def _of_inputs(
    role: WeightInput, to: Quantization, shapes: Mapping[str, tuple[int, ...]]
) -> Shard | None:
    """The shard shared by a recipe's parts if each rank has only some of their inputs."""
    _, shard = role.pieces[0]
    depth_at = len(shapes[role.parts[0]]) - (2 if to.transposed else 1)
    return shard if shard is not None and shard.dim == depth_at else None


def _shape(role: WeightInput, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a plain recipe's weight. A stack of experts [E, N, K] goes on with the rows
    [n, K] of more of them."""
    sizes = _sizes(role, shapes)
    if not sizes[0]:
        return ()
    count = sum(size[0] for size in sizes if len(size) == len(sizes[0]))
    rows = sum(size[0] for size in sizes if len(size) < len(sizes[0]))
    return (count + (rows // sizes[0][1] if rows else 0), *sizes[0][1:])


def _sizes(role: WeightInput, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of its parts, which are concatenated."""
    sizes = []
    for name, shard in role.pieces:
        size = list(shapes[name][::-1] if role.transposed else shapes[name])
        if shard is not None:
            size[shard.dim] = shard.length
        sizes.append(tuple(size))
    return sizes


def _some_of(
    shard: Shard | None, shape: tuple[int, ...], transposed: bool, rank: int
) -> SomeOf | None:
    """The part of a stored parameter of this shape that a rank needs; None: all of it."""
    if shard is None:
        return None
    dim = 1 - shard.dim if transposed else shard.dim
    return SomeOf(shape=shape, dim=dim, ranges=tuple(shard.ranges(rank)))


def _whole_blocks(role: WeightInput, shapes: Mapping[str, tuple[int, ...]]) -> list[WeightInput]:
    """One recipe per part if all have whole blocks, so that only one is in memory at a time."""
    if any(len(size) == 2 and size[0] % CHANNELS for size in _sizes(role, shapes)):
        return [role]
    return [
        dataclasses.replace(role, parts=(part,), shards=() if shard is None else (shard,))
        for part, shard in role.pieces
    ]


def _rows_at_once(depth: int) -> int:
    """Rows of whole blocks with about a million values: quantizing makes several float32 copies."""
    return max(1, (1 << 20) // (depth * CHANNELS)) * CHANNELS


def make_weight(
    role: WeightInput,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    memory: HugePages | None,
    *,
    rank: int = 0,
) -> Tensor:
    """Create the weight of one recipe: read its parts into their slices, transposed if required.

    Without a `memory` it is temporary and on CPU, and its memory is released when it is freed.
    """
    if role.functions or role.order:
        return _computed(role, shapes, dtype, source, memory, rank)
    sizes = _sizes(role, shapes)
    shape = _shape(role, shapes)
    out = staging(shape, dtype) if memory is None else memory.empty(shape, dtype)
    places = out.view(-1).split([math.prod(size) for size in sizes])
    for (part, shard), size, place in zip(role.pieces, sizes, places, strict=True):
        some = _some_of(shard, shapes[part], role.transposed, rank)
        if role.transposed:
            plain = staging(size[::-1], dtype)
            source.fill(part, plain, some)
            place.view(size).copy_(plain.T)
        else:
            source.fill(part, place.view(size), some)
    return out
