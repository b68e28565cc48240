"""Launch options of every kernel, keyed by shape class: block sizes, warps, stages, splits.

No autotuning at startup: the options here and in linear_configs.py are used as they are, or those
of a table that was measured before (llmc/kernels/tuned.py). They are chosen for H100 and H200 from
the kernels' register and shared-memory use. They have run there (docs/gpu.md), but others were NOT
YET TRIED.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.kernels.tuned import tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    block_m: int  # maximum rows of a query tile: queries x heads of a group
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int
    waves: int  # target programs per multiprocessor when long contexts are split
    min_tiles: int  # a key range is at least this many tiles
    combine_rows: int  # rows of a tile and key ranges that are combined at a time
    combine_splits: int
    # per thread, on NVIDIA GPUs: so few that `waves` programs are resident at once. 0: any number
    max_registers: int = 0
    # load whole tiles through tensor descriptors where the cache allows it: off until measured
    descriptors: bool = False
    # with descriptors, on GPUs for which Triton can: separate warps copy, multiply and compute the
    # softmax. Off until measured
    warp_specialize: bool = False


@tuned()
def attention_config(
    rows: int, dim: int, itemsize: int, cache_itemsize: int, biased: bool
) -> AttentionConfig:
    """rows: average queries per request x heads of a group; dim: the larger padded head size.
    biased: with a bias by distance, which takes a pointer per score."""
    widens = cache_itemsize < itemsize  # dequantizing takes registers
    if itemsize == 4:  # float32 is for checking, not for speed: small tiles that always fit
        block_n = 16 if dim >= 128 else 32
        return AttentionConfig(
            block_m=16, block_n=block_n, num_warps=4, num_stages=1, waves=2, min_tiles=8,
            combine_rows=1, combine_splits=8,
        )  # fmt: skip
    if dim > 256:  # a tile of 16 keys takes 16 KB
        return AttentionConfig(
            block_m=16 if rows <= 16 else 32, block_n=16, num_warps=4 if rows <= 16 else 8,
            num_stages=2, waves=2, min_tiles=4, combine_rows=1, combine_splits=4,
        )  # fmt: skip
    if rows <= 16:  # decode
        return AttentionConfig(
            block_m=16, block_n=32 if dim > 128 else 64, num_warps=4, num_stages=3, waves=4,
            min_tiles=4, combine_rows=4, combine_splits=8,
            max_registers=128 if dim > 64 and not widens else 0,
        )  # fmt: skip
    if rows <= 64 or dim > 128 or widens:  # few draft or prompt tokens per request, or wide heads
        return AttentionConfig(
            block_m=64 if rows > 32 else 32, block_n=32 if dim > 128 or biased else 64,
            num_warps=8 if dim > 128 and rows > 32 else 4, num_stages=2,
            waves=2, min_tiles=4, combine_rows=4, combine_splits=4,
        )  # fmt: skip
    return AttentionConfig(  # prompts
        block_m=128, block_n=32 if biased else 64, num_warps=8, num_stages=3, waves=2, min_tiles=8,
        combine_rows=8, combine_splits=4,
    )  # fmt: skip


def rows_capacity(rows: int) -> int:
    """The size of a kernel's per-request vectors; few size classes, so few compilations."""
    return next((size for size in (16, 64, 256, 1024, 4096) if rows <= size), 16384)


GATHER_TOKENS = 32  # tokens per program that copies one head out of its pages
WRITE_ELEMENTS = 1024  # elements per cache-write program: whole heads of one token
ROPE_ELEMENTS = 512
TOGETHER_ELEMENTS = 8192  # the same, of heads that are normalized together
POINTWISE_BLOCK = 1024
LOGITS_BLOCK = 2048  # tokens of the vocabulary per program
HISTORY_BLOCK = 1024  # tokens of a request's history that a program counts at a time
DELTA_CHUNK = 16  # tokens of a prompt whose corrections are solved for together
DELTA_ELEMENTS = 2048  # elements of a head's state in one warp's registers
SCAN_ELEMENTS = 1024
STATE_CHANNELS = 64  # per program of the ops whose state is a vector


def tokens_at_once(tokens: int, requests: int) -> int:
    """Tokens of a request per tile, by the average request; few classes, so few compilations."""
    return next((size for size in (1, 4, 16) if tokens <= size * requests), 32)


def row_warps(block: int) -> int:
    """Warps for a kernel that holds a whole row."""
    return 1 if block <= 256 else 4 if block <= 4096 else 8 if block <= 16384 else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@tuned()
def expert_config(rows: int, experts: int, itemsize: int) -> GemmConfig:
    """rows: the total over all experts."""
    if itemsize == 4:
        return GemmConfig(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
    if rows <= 16 * experts:
        return GemmConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if rows <= 64 * experts:
        return GemmConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3)
    return GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


@tuned(least={"block_k": 32})  # what some formats pack together
def low_bit_expert_config(rows: int, experts: int, itemsize: int) -> GemmConfig:
    """The same for weights that are dequantized in registers, as for `low_bit_config`.

    Each tile of rows dequantizes its channels again. By the instructions in the code for an H100,
    issuing those of a step of the loop takes as long as 1.8 (int4) to 2.5 (mxfp4) times its
    products in tiles of 128 x 64, and 0.9 to 1.15 times in tiles of 256 x 128. So many rows are not
    dequantized into a scratch first, as for a linear: writing and reading that takes the time of
    the products of 500 rows, and few steps have as many for each expert.
    """
    if itemsize == 4:
        return GemmConfig(block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=2)
    if rows <= 16 * experts:
        return GemmConfig(block_m=16, block_n=32, block_k=128, num_warps=4, num_stages=3)
    if rows <= 64 * experts:
        return GemmConfig(block_m=32, block_n=64, block_k=64, num_warps=4, num_stages=3)
    if rows <= 128 * experts:
        return GemmConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3)
    return GemmConfig(block_m=256, block_n=128, block_k=32, num_warps=8, num_stages=3)


@tuned(fixed=("block_k",))
def scaled_expert_config(rows: int, experts: int, group: int, depth: int) -> GemmConfig:
    """The same for products of float8 with a scale per `group` of the depth: block_k divides it."""
    block_k = 128 if group == depth else min(128, group & -group)
    if rows <= 16 * experts:
        return GemmConfig(block_m=16, block_n=64, block_k=block_k, num_warps=4, num_stages=4)
    if rows <= 64 * experts:
        return GemmConfig(block_m=64, block_n=128, block_k=block_k, num_warps=4, num_stages=3)
    return GemmConfig(block_m=128, block_n=128, block_k=block_k, num_warps=8, num_stages=3)
