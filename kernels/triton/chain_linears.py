"""`chain_linears` in Triton: for few rows, one persistent kernel runs all four linears.

A fixed number of programs walks the tiles of a linear, with the tiles and the code of
`few_rows_kernel`, so results are the same (under the interpreter, bit for bit). Then all programs
wait for each other before they read what the others have stored. Before it waits, a program
prefetches its first tile of the next weight into L2, so the memory is busy across the barrier.

- Counters: of the stream (counters.py). One counts arrivals at the barriers and grows from one to
  the next; the last program to leave the kernel sets it back to zero. So replays of a graph need no
  reset by the host, and what a launch allocates depends on shapes only.
- Memory order: all threads of a program meet, one adds with release, one polls with acquire, and
  all meet again, at the scope of the GPU. Besides, values that another program may have stored in
  this launch are read from L2 (".cg"): L1 is not coherent.
- No deadlock: the launch is cooperative, so all programs are resident, or it is an error before
  any runs. There are a few programs per multiprocessor, for which registers and shared memory
  always suffice; under MPS and MIG, multiprocessors are counted in the partition. Programs wait
  only for each other, so the loop has no bound.
- Dependent launch: the kernel starts after the previous one has ended, since no documentation says
  that a cooperative launch may start earlier. It lets the next one start before its last linear.
- Elsewhere (AMD GPUs, whose barriers order memory differently; more rows; shapes for which
  `few_rows_kernel` is not used), the ordinary kernels run.

The interpreter runs programs one after another, so it runs either one program or, with several, a
launch for each linear.

The idea of prefetching weights across the ops of a persistent kernel is that of "No Bubbles" (Hazy
Research, 2025), which has finer counters than a barrier. Not measured on a GPU yet.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.chain_linears import chain_linears
from llmc.kernels.fused_linear import add_linear
from llmc.kernels.fused_linear import fused_linear as one_linear
from llmc.kernels.triton import dependent_launch, fused_linear
from llmc.kernels.triton.counters import arrive, counters, is_last, wait_until
from llmc.kernels.triton.define import (
    define,
    interpreted,
    needs_upcast,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.dependent_launch import start_next
from llmc.kernels.triton.fused_linear import linear_tile, prefetch_tile
from llmc.kernels.triton.launch import Launch, Plan, cdiv, multiprocessors
from llmc.kernels.triton.linear_configs import few_rows_config

# Programs per multiprocessor, for one row and for more. Their registers fit into the 65536 of every
# GPU since sm_80, and their shared memory into 100 KiB (tests/kernels/test_triton_aot.py).
_PROGRAMS = (4, 2)
_MAX_REGISTERS = (128, 255)  # per thread, of 128 threads
_TILES = 32  # the first counter of a tile: the barrier's is alone in its line of 128 bytes


@triton.jit
def _prefetch_first(
    weight, weight_row,
    N: tl.constexpr, K: tl.constexpr, DIVISION: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Prefetch this program's first tile of a linear."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    item = tl.program_id(0)
    if item < BLOCKS * DIVISION[0]:
        first = item // BLOCKS * DIVISION[1]
        prefetch_tile(weight, weight_row, item % BLOCKS, first, N, K, BLOCK_N, DIVISION[2], GATED)


@triton.jit
def _walk(
    x, weight, bias, norm_weight, residual, out, partial, squares, counter, rows, x_row,
    weight_row, eps, offset,
    N: tl.constexpr, K: tl.constexpr, DIVISION: tl.constexpr, NORM: tl.constexpr,
    ACT: tl.constexpr, CACHE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's tiles of one linear. DIVISION: (SPLITS, SPLIT_K, BLOCK_K) of `linear_tile`."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for item in tl.range(tl.program_id(0), BLOCKS * DIVISION[0], PROGRAMS):
        linear_tile(
            item % BLOCKS, item // BLOCKS, x, weight, bias, norm_weight, residual, out, partial,
            squares, counter, rows, x_row, weight_row, N, eps, offset,
            N, K, DIVISION[0], DIVISION[1], BLOCK_M, BLOCK_N, DIVISION[2], NORM,
            norm_weight is not None, bias is not None, ACT, residual is not None, DOT, PRECISION,
            UPCAST, CACHE, N % BLOCK_N == 0 and K % DIVISION[2] == 0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def chain_kernel(
    hidden, x, inner, out, weight, bias, up_weight, up_bias, up_norm, down_weight, down_bias,
    next_weight, next_bias, next_norm, partial, squares, counter, rows, x_row, weight_row,
    up_row, down_row, next_row, up_eps, up_offset, next_eps, next_offset,
    C: tl.constexpr, K: tl.constexpr, F: tl.constexpr, N: tl.constexpr,
    DIVISION: tl.constexpr, UP_DIVISION: tl.constexpr, DOWN_DIVISION: tl.constexpr,
    NEXT_DIVISION: tl.constexpr, ACT: tl.constexpr, ONLY: tl.constexpr,
    PROGRAMS: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All four linears, or with ONLY >= 0 one of them, by PROGRAMS programs.

    The arguments are those of the op. `counter` counts arrivals at the barriers; the counters of
    tiles begin TILES later.
    """
    ALL: tl.constexpr = ONLY < 0
    tiles = counter + TILES
    if ALL or ONLY == 0:
        _walk(
            x, weight, bias, None, hidden, hidden, partial, squares, tiles, rows, x_row, weight_row,
            0.0, 0.0, C, K, DIVISION, False, None, "", BLOCK_M, BLOCK_N, DOT, PRECISION, UPCAST,
            PROGRAMS,
        )  # fmt: skip
    if ALL:
        arrive(counter)
        if PROGRAMS > 1:
            _prefetch_first(up_weight, up_row, F, C, UP_DIVISION, BLOCK_N, True)
            wait_until(counter, PROGRAMS)
    if ALL or ONLY == 1:
        _walk(
            hidden, up_weight, up_bias, up_norm, None, inner, partial, squares, tiles, rows, C,
            up_row, up_eps, up_offset, F, C, UP_DIVISION, True, ACT, ".cg", BLOCK_M, BLOCK_N, DOT,
            PRECISION, UPCAST, PROGRAMS,
        )  # fmt: skip
    if ALL:
        arrive(counter)
        if PROGRAMS > 1:
            _prefetch_first(down_weight, down_row, C, F, DOWN_DIVISION, BLOCK_N, False)
            wait_until(counter, 2 * PROGRAMS)
    if ALL or ONLY == 2:
        _walk(
            inner, down_weight, down_bias, None, hidden, hidden, partial, squares, tiles, rows, F,
            down_row, 0.0, 0.0, C, F, DOWN_DIVISION, False, None, ".cg", BLOCK_M, BLOCK_N, DOT,
            PRECISION, UPCAST, PROGRAMS,
        )  # fmt: skip
    if ALL:
        arrive(counter)
        if PROGRAMS > 1:
            _prefetch_first(next_weight, next_row, N, C, NEXT_DIVISION, BLOCK_N, False)
            wait_until(counter, 3 * PROGRAMS)
    if PDL:
        start_next()
    if ALL or ONLY == 3:
        _walk(
            hidden, next_weight, next_bias, next_norm, None, out, partial, squares, tiles, rows, C,
            next_row, next_eps, next_offset, N, C, NEXT_DIVISION, True, None, ".cg", BLOCK_M,
            BLOCK_N, DOT, PRECISION, UPCAST, PROGRAMS,
        )  # fmt: skip
    if ALL:  # once all are here, none polls any more
        is_last(counter, 4 * PROGRAMS)


def plan(
    hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, up_weight: Tensor,
    up_bias: Tensor | None, up_norm: Tensor | None, up_eps: float, up_offset: float, act: str,
    down_weight: Tensor, down_bias: Tensor | None, next_weight: Tensor, next_bias: Tensor | None,
    next_norm: Tensor | None, next_eps: float, next_offset: float, *, programs: int | None = None,
) -> Plan[Tensor]:  # fmt: skip
    """For what `takes` accepts. `programs`: for tests, how many programs the interpreter runs; more
    than one take a launch for each linear."""
    channels, depth = weight.shape
    inner = down_weight.shape[1]
    flat = x.reshape(-1, depth)
    rows = flat.shape[0]
    processors = 3 if interpreted() else multiprocessors(x.device)
    size = weight.element_size()
    configs = [
        few_rows_config(rows, n, k, size, gated, processors, measured=False)
        for n, k, gated in (
            (channels, depth, False), (inner, channels, True), (channels, inner, False),
            (next_weight.shape[0], channels, False),
        )
    ]  # fmt: skip
    tiles = configs[0].tiles
    blocks = [cdiv(n, tiles.block_n) for n in (channels, inner, channels, next_weight.shape[0])]
    widths = (channels, 2 * inner, channels, next_weight.shape[0])
    splits = [config.splits for config in configs]
    divisions = [(c.splits, c.split_k, c.tiles.block_k) for c in configs]
    out = x.new_empty(*hidden.shape[:-1], next_weight.shape[0])
    sums = max(s * rows * width for s, width in zip(splits, widths, strict=True))
    squares = max(s * rows * count for s, count in zip(splits, blocks, strict=True))
    if programs is None:
        programs = 1 if interpreted() else processors * _PROGRAMS[rows > 1]
    args = {
        "hidden": hidden, "x": flat, "inner": x.new_empty(rows, inner), "out": out,
        "weight": weight, "bias": bias, "up_weight": up_weight, "up_bias": up_bias,
        "up_norm": up_norm, "down_weight": down_weight, "down_bias": down_bias,
        "next_weight": next_weight, "next_bias": next_bias, "next_norm": next_norm,
        "partial": x.new_empty(sums, dtype=torch.float32),
        "squares": x.new_empty(squares, dtype=torch.float32),
        "counter": counters(x.device, _TILES + max(blocks)), "rows": rows,
        "x_row": flat.stride(0), "weight_row": weight.stride(0), "up_row": up_weight.stride(0),
        "down_row": down_weight.stride(0), "next_row": next_weight.stride(0), "up_eps": up_eps,
        "up_offset": up_offset, "next_eps": next_eps, "next_offset": next_offset,
    }  # fmt: skip
    constants = {
        "C": channels, "K": depth, "F": inner, "N": next_weight.shape[0],
        "DIVISION": divisions[0], "UP_DIVISION": divisions[1], "DOWN_DIVISION": divisions[2],
        "NEXT_DIVISION": divisions[3], "ACT": act, "PROGRAMS": programs, "TILES": _TILES,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "DOT": rows > 1,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "UPCAST": needs_upcast(x.dtype), "PDL": dependent_launch.applies_to(x.device),
    }  # fmt: skip
    by_linear = interpreted() and programs > 1
    launches = tuple(
        Launch(
            kernel=chain_kernel,
            grid=(programs,),
            args=args,
            constants={**constants, "ONLY": only},
            num_warps=tiles.num_warps,
            num_stages=min(config.tiles.num_stages for config in configs),
            max_registers=_MAX_REGISTERS[rows > 1],
            cooperative=not interpreted(),
        )
        for only in (range(4) if by_linear else [-1])
    )
    return Plan(out=out, launches=launches)


def supported() -> bool:
    """Whether this GPU runs the persistent kernel."""
    return interpreted() or _supported()


@cache
def _supported() -> bool:
    if torch.version.hip or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 8


def takes(hidden: Tensor, *weights: Tensor) -> bool:
    """Whether one kernel computes these rows: where `few_rows_kernel` would run each linear."""
    few = all(fused_linear.takes(hidden, weight, 0.0) for weight in weights)
    return few and hidden.is_contiguous() and supported()


def _run(
    hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, up_weight: Tensor,
    up_bias: Tensor | None, up_norm: Tensor | None, up_eps: float, up_offset: float, act: str,
    down_weight: Tensor, down_bias: Tensor | None, next_weight: Tensor, next_bias: Tensor | None,
    next_norm: Tensor | None, next_eps: float, next_offset: float,
) -> Tensor:  # fmt: skip
    if takes(hidden, weight, up_weight, down_weight, next_weight):
        return plan(
            hidden, x, weight, bias, up_weight, up_bias, up_norm, up_eps, up_offset, act,
            down_weight, down_bias, next_weight, next_bias, next_norm, next_eps, next_offset,
        ).run()  # fmt: skip
    # each op falls back by itself: `hidden` has changed after the first
    add_linear.run(hidden, x, weight, bias, None, None, 0.0, None)
    inner = one_linear.run(hidden, up_weight, up_bias, up_norm, up_eps, up_offset, act, None)
    add_linear.run(hidden, inner, down_weight, down_bias, None, None, 0.0, None)
    out: Tensor = one_linear.run(
        hidden, next_weight, next_bias, next_norm, next_eps, next_offset, None, None
    )
    return out


def _supports(**given: object) -> bool:
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    norms = "up_norm", "next_norm"
    return supports_tensors(*tensors) and same_dtype(
        *(value for name, value in given.items() if isinstance(value, Tensor) and name not in norms)
    )


define(chain_linears, run=_run, supports=_supports)
