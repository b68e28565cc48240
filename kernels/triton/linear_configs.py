"""Launch options of the linears by shape: the committed table that takes the place of autotuning.

NOT YET MEASURED on a GPU: every entry is chosen from what others report and from the resources that
the ahead-of-time builds show. `MEASURED` lists the shape classes that `python -m bench.linears` has
confirmed; it is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.kernels.triton.launch import cdiv, power_of_2

FEW_ROWS = 8  # of x: up to here a linear is bound by reading its weight
MEASURED: tuple[str, ...] = ()
_WAVES = 4  # programs wanted per multiprocessor, so that reads are always under way


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """`splits`: parts of the depth that are summed apart, `split_k` inputs each."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    split_k: int
    num_warps: int
    num_stages: int


def prefers_library(channels: int, depth: int) -> bool:
    """Whether cuBLAS multiplies few rows faster: wide and shallow, such as most output heads."""
    return channels > 32768 and depth <= 2048


def few_rows_config(
    rows: int, channels: int, depth: int, size: int, multiprocessors: int
) -> LinearConfig:
    """For up to FEW_ROWS rows: one is multiplied lane by lane, more by tensor cores.

    size: bytes of the weight that an input of a channel meets, twice as many where one is gated.
    """
    if rows == 1:
        block_k = min(power_of_2(depth), 2048 // size)
        return _divided(1, 8, block_k, channels, depth, multiprocessors, 4, 2)
    block_k = min(power_of_2(depth, 16), 512 // size if size < 8 else 32)
    stages = 4 if size == 2 else 3 if size == 4 else 1
    return _divided(16, 16, block_k, channels, depth, multiprocessors, 4, stages)


def low_bit_config(
    rows: int, channels: int, depth: int, per_word: int, multiprocessors: int, itemsize: int
) -> LinearConfig:
    """block_k is in inputs; a word holds `per_word` of them."""
    if rows == 1:
        return _divided(1, 16, 128 * per_word, channels, depth, multiprocessors, 4, 2)
    if rows <= 16:
        block_k = 128 if itemsize == 2 else 64
        return _divided(16, 32, block_k, channels, depth, multiprocessors, 4, 3)
    if rows <= 64 or itemsize == 4:
        return LinearConfig(
            block_m=32, block_n=64, block_k=64 if itemsize == 2 else 32, splits=1, split_k=depth,
            num_warps=4, num_stages=3 if itemsize == 2 else 1,
        )  # fmt: skip
    return LinearConfig(
        block_m=128, block_n=64, block_k=64, splits=1, split_k=depth, num_warps=8, num_stages=3
    )


def _divided(
    block_m: int, block_n: int, block_k: int, channels: int, depth: int, multiprocessors: int,
    num_warps: int, num_stages: int,
) -> LinearConfig:  # fmt: skip
    """Deep and narrow linears are divided along their depth until the GPU has enough to read."""
    steps = cdiv(depth, block_k)
    wanted = _WAVES * multiprocessors // max(1, cdiv(channels, block_n))
    splits = max(1, min(8, steps, wanted))
    split_k = cdiv(steps, splits) * block_k
    return LinearConfig(
        block_m=block_m, block_n=block_n, block_k=block_k, splits=cdiv(depth, split_k),
        split_k=split_k, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
