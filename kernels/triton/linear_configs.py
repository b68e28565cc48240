"""Launch options of the linears by shape.

Those of `few_rows_tiles` in 16-bit weights were measured on an H200, in a chain of a layer's
kernels as a step launches them (docs/gpu.md). The others are NOT YET MEASURED: chosen
from published results and from the resource use that the ahead-of-time builds report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llmc.kernels.triton.launch import cdiv, power_of_2
from llmc.kernels.tuned import tuned

FEW_ROWS = 8  # up to this many rows of x, a linear is bound by reading its weight
# Up to this many, one kernel with the norm and the activation is faster than the library's products
# between kernels of their own: by 7 % with 16 rows in layers of an 8B model (H200).
FUSED_ROWS = 16
# With a LayerNorm, every tile of channels reads the rows once more. Beyond this many rows, that
# takes longer than a kernel of its own: of 4,096 inputs, 512 tiles read 16 MiB for 4 rows, about
# 3 us of an H200's L2 cache. Not measured yet.
CENTERED_ROWS = 4
# From this many rows, a quantized weight is dequantized once and the library multiplies. Per value
# of the weight that moves about 4.5 bytes (read, written, read again), for which an H100 needs the
# time of the products of 500 rows in bfloat16. A kernel that dequantizes in every tile of rows
# reaches perhaps a third of the library's speed: it loses the time of two rows per row.
WIDE_ROWS = 256
# The same for codes of fp8, of which 3 bytes move, and whose products take half the time.
SCALED_ROWS = 128
WIDE_BYTES = 128 << 20  # of the scratch: enough channels at a time to occupy every multiprocessor
WIDE_BLOCK = 512  # inputs of 16 channels that a program dequantizes
_MAX_GROUPS = 16  # parts of the depth of a linear, each a group of a gated norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTiles:
    """The chosen options. `waves`: target programs per multiprocessor, to keep reads in flight: a
    deep and narrow linear is split along its depth until there are that many. 0: never."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    waves: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WideConfig:
    min_rows: int  # from which the weight is dequantized once, or its codes are multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """The options for one linear. `splits`: the number of parts of the depth that are summed
    separately, with `split_k` inputs each."""

    tiles: LinearTiles
    splits: int
    split_k: int


def prefers_library(channels: int, depth: int) -> bool:
    """Whether cuBLAS is faster for few rows: wide and shallow weights, like most output heads."""
    return channels > 32768 and depth <= 2048


def few_rows_config(
    rows: int,
    channels: int,
    depth: int,
    itemsize: int,
    gated: bool,
    multiprocessors: int,
) -> LinearConfig:
    """For up to FUSED_ROWS rows: one is multiplied lane by lane, more by tensor cores.

    itemsize: bytes of a weight. gated: each channel has a gate, so two weights per input.
    """
    tiles = few_rows_tiles(rows, channels, depth, itemsize, gated)
    return _divided(tiles, channels, depth, multiprocessors)


@tuned(fixed=("block_m",))  # a program computes all rows
def few_rows_tiles(rows: int, channels: int, depth: int, itemsize: int, gated: bool) -> LinearTiles:
    """One row: `num_stages` above 1 loads tiles ahead, which needs enough of them to pay.

    More rows: each tile of channels takes the norm of the rows anew, so tiles must not be narrow.
    Shared memory stays below the 99 KiB of consumer GPUs.
    """
    size = itemsize * (2 if gated else 1)
    if rows == 1 and depth >= 4096:
        block_n, inputs = (4, 2048) if gated else (8, 2048 if depth > 8192 else 1024)
        return LinearTiles(
            block_m=1, block_n=block_n, block_k=inputs // itemsize, num_warps=4, num_stages=3
        )
    if rows == 1:
        block_k = min(power_of_2(depth), 2048 // size)
        return LinearTiles(block_m=1, block_n=8, block_k=block_k, num_warps=4, num_stages=1)
    if itemsize == 2 and (gated or channels >= 2048):
        block_k = min(power_of_2(depth, 16), 256)
        # a third stage of both weights fits, except into the 64 KiB of AMD's; it pays if deep
        stages = 2 if gated and (depth < 4096 or torch.version.hip) else 3
        return LinearTiles(block_m=16, block_n=32, block_k=block_k, num_warps=4, num_stages=stages)
    block_k = min(power_of_2(depth, 16), 512 // size if size < 8 else 32)
    stages = 4 if size == 2 else 3 if size == 4 else 1
    return LinearTiles(block_m=16, block_n=16, block_k=block_k, num_warps=4, num_stages=stages)


def gated_rows_config(
    rows: int, channels: int, depth: int, group: int, size: int, multiprocessors: int
) -> LinearConfig | None:
    """The same with a gated norm of groups of inputs before the linear. None: a kernel of its own
    computes the norm.

    A group is the whole depth, or a tile holds whole groups, or each part of the depth is a group.
    Every tile of channels computes the norm again, so tiles of several rows have more channels.
    """
    if rows == 1:
        block_k = min(power_of_2(depth), 2048 // size)
        tiles = LinearTiles(block_m=1, block_n=8, block_k=block_k, num_warps=4, num_stages=1)
    else:
        block_k = min(power_of_2(depth, 16), 256 // size)
        stages = 4 if size == 2 else 2
        tiles = LinearTiles(block_m=16, block_n=64, block_k=block_k, num_warps=4, num_stages=stages)
    block_k = tiles.block_k
    if group == depth:
        return _divided(tiles, channels, depth, multiprocessors)
    if group <= max(block_k, 512 // size) and group == power_of_2(group):
        tiles = replace(tiles, block_k=max(block_k, group))
        return _divided(tiles, channels, depth, multiprocessors)
    block_k = min(block_k, group & -group)
    if block_k < 32 or depth // group > _MAX_GROUPS:
        return None
    return LinearConfig(tiles=replace(tiles, block_k=block_k), splits=depth // group, split_k=group)


def low_bit_config(
    rows: int,
    channels: int,
    depth: int,
    per_word: int,
    multiprocessors: int,
    itemsize: int,
    gated: bool = False,
) -> LinearConfig:
    """The same for quantized weights. block_k is in inputs; a word holds `per_word` of them."""
    tiles = low_bit_tiles(rows, channels, depth, per_word, itemsize, gated)
    return _divided(tiles, channels, depth, multiprocessors)


@tuned(least={"block_k": 32})  # what some formats pack together
def low_bit_tiles(
    rows: int, channels: int, depth: int, per_word: int, itemsize: int, gated: bool
) -> LinearTiles:
    wide = itemsize == 4
    if rows == 1:  # a program holds the words of both weights in registers
        words = 64 if gated else 128
        return LinearTiles(
            block_m=1, block_n=16, block_k=words * per_word, num_warps=4, num_stages=2
        )
    if rows <= 16:
        block_k = 64 if wide or gated else 128
        return LinearTiles(block_m=16, block_n=32, block_k=block_k, num_warps=4, num_stages=3)
    if rows <= 64 or wide:
        return LinearTiles(
            block_m=32, block_n=64, block_k=32 if wide else 64, num_warps=4,
            num_stages=1 if wide else 3, waves=0,
        )  # fmt: skip
    return LinearTiles(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3, waves=0)


@tuned()
def wide_config(per_word: int, itemsize: int, codes: bool) -> WideConfig:
    """For quantized weights of which a word holds `per_word` inputs. codes: with inputs in fp8, on
    a GPU that multiplies those."""
    return WideConfig(min_rows=SCALED_ROWS if codes else WIDE_ROWS)


def scaled_tiles(group: int, depth: int) -> LinearTiles:
    """For products of float8 with a scale per `group` of the depth: block_k divides it."""
    block_k = 128 if group == depth else min(128, group & -group)
    return LinearTiles(block_m=128, block_n=128, block_k=block_k, num_warps=8, num_stages=3)


def _divided(tiles: LinearTiles, channels: int, depth: int, multiprocessors: int) -> LinearConfig:
    """Split deep and narrow linears along their depth until there are enough programs."""
    if tiles.waves == 0:
        return LinearConfig(tiles=tiles, splits=1, split_k=depth)
    steps = cdiv(depth, tiles.block_k)
    wanted = tiles.waves * multiprocessors // max(1, cdiv(channels, tiles.block_n))
    splits = max(1, min(8, steps, wanted))
    split_k = cdiv(steps, splits) * tiles.block_k
    return LinearConfig(tiles=tiles, splits=cdiv(depth, split_k), split_k=split_k)
