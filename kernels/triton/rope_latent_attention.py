"""`rope_latent_attention` in Triton: for few tokens, the queries are rotated and meet the weight in
the kernel that writes the keys."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.latent_attention import latent_attention
from llmc.kernels.rope_latent_attention import rope_latent_attention
from llmc.kernels.rope_write_latent import rope_write_latent
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton import latent_attention as attention
from llmc.kernels.triton import rope_write_latent as rope
from llmc.kernels.triton.define import define
from llmc.kernels.triton.dependent_launch import wait_for_previous
from llmc.kernels.triton.latent_attention import head_weight, multiply_head
from llmc.kernels.triton.launch import Launch, Plan, cdiv
from llmc.kernels.triton.rope_write import turn
from llmc.kernels.triton.rope_write_latent import write_latent_key


@triton.jit(do_not_specialize=["rows"])
def latent_query_kernel(
    x, weight, out, latent, shared, norm, cos_table, sin_table, positions, key_cache, slots,
    k_scale, rows, x_row, x_head, weight_head, weight_in, weight_out, out_row, out_head,
    latent_token, shared_token, cos_row, sin_row, kc_block, kc_slot, eps, offset,
    HEADS: tl.constexpr, HEAD_IN: tl.constexpr, HEAD_OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a head's channels for all rows, and with the first tile the rotated channels behind
    them. Programs of heads that do not exist write the key of one token each."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    w = head_weight(weight, tile, head, weight_head, weight_in, weight_out, head < HEADS, HEAD_IN,
                    HEAD_OUT, BLOCK_N, BLOCK_K)  # fmt: skip
    if PDL:
        wait_for_previous()
    if head < HEADS:
        m = tl.arange(0, BLOCK_M)[:, None]
        x_at = x + m.to(tl.int64) * x_row + head * x_head
        out_at = out + m.to(tl.int64) * out_row + head * out_head
        multiply_head(
            x_at, w, out_at, tile, m, rows, HEAD_IN, HEAD_OUT, BLOCK_N, BLOCK_K, PRECISION, UPCAST
        )
        if tile == 0:
            live = m < rows
            r = tl.arange(0, WIDTH_PAD)[None, :]
            position = tl.load(positions + m, mask=live, other=0).to(tl.int64)
            turned = turn(
                x_at + HEAD_IN, None, cos_table + position * cos_row,
                sin_table + position * sin_row, live, eps, offset, 0, WIDTH, WIDTH_PAD, WIDTH,
                INTERLEAVED,
            )  # fmt: skip
            tl.store(
                out_at + HEAD_OUT + r, turned.to(out.dtype.element_ty), mask=live & (r < WIDTH)
            )
    else:
        token = (head - HEADS) * tl.num_programs(0) + tile
        if token < rows:
            position = tl.load(positions + token).to(tl.int64)
            write_latent_key(
                token, latent, shared, norm, cos_table + position * cos_row,
                sin_table + position * sin_row, key_cache, slots, k_scale, latent_token,
                shared_token, kc_block, kc_slot, eps, offset, BLOCK_SIZE, RANK, RANK_PAD, WIDTH,
                WIDTH_PAD, INTERLEAVED, NORM, FORMAT, K_SCALE_STRIDE,
            )  # fmt: skip


def plan_query(**given: Any) -> Plan[Tensor]:
    """Queries [T, H, R + Dr] that met the weight and were rotated, for up to FUSED_ROWS tokens."""
    query, weight = given["query"], attention.by_head(given)
    tokens, heads, dim = query.shape
    out = query.new_empty(tokens, heads, given["key_cache"].shape[3])
    keys, sizes = rope.key_options(
        **{name: given[name] for name in rope_write_latent.defaults if name != "query"}
    )
    product, tiling = attention.product_options(query, weight[:, : dim - sizes["WIDTH"]], out)
    tiles = cdiv(tiling["HEAD_OUT"], tiling["BLOCK_N"])
    pdl = dependent_launch.applies_to(query.device)
    launch = Launch(
        kernel=latent_query_kernel,
        grid=(tiles, heads + cdiv(tokens, tiles)),
        args={**keys, **product},
        constants={**sizes, **tiling, "HEADS": heads, "PDL": pdl},
        pdl=pdl,
    )
    return Plan(out=out, launches=(launch,))


def _run(*args: Any) -> Tensor:
    given = rope_latent_attention.bind(args)
    if attention.takes(given["query"]):
        return attention.attend_to_latents(plan_query(**given).run(), given, few=True)
    rotated = rope.plan(**{name: given[name] for name in rope_write_latent.defaults}).run()
    taken = {**given, "query": rotated}
    return attention.run(*(taken[name] for name in latent_attention.defaults))


def _supports(**given: Any) -> bool:
    write = {name: given[name] for name in rope_write_latent.defaults}
    read = {name: given[name] for name in latent_attention.defaults}
    return rope.supports(**write) and attention.supports(**read)


define(rope_latent_attention, run=_run, supports=_supports)
