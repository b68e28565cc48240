"""The part of the attention kernel that first writes this step's keys and values to the cache.

No program waits for another one: each writes all that this step adds to its own range of keys, for
its own key head, and only then reads the range.

- A range is part of [lo, hi): what the queries of a tile see, up to the last of them. It contains
  the tile's own tokens, with windows and chunks too, so every token is written by some program.
- The tokens of this step in [lo, hi) are consecutive tokens of the same request, because a step's
  tokens are the last of its context. Keys before them are from earlier steps. That holds for shared
  prefixes: a block is shared only once it is computed, and then no longer written.
- Query tiles, and head tiles of one key head, can have ranges in common. They write the same bits
  to the same slots, so it does not matter who is first, and all read only what they wrote too.
- Padding has no context, hence no keys: nothing is written, nor is a token with a negative slot.

The barrier makes the writes of a program's threads visible to its other threads (`orders_stores` in
counters.py says on which GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.triton.cached import slot_scale, store_heads
from llmc.kernels.triton.counters import barrier
from llmc.kernels.triton.rope_write import mean_square, normed_together, turn
from llmc.kernels.triton.write_kv import copy_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The arguments of `rope_write` that `paged_attention` does not have."""

    key: Tensor
    value: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    norm_offset: float
    cos_table: Tensor
    sin_table: Tensor
    positions: Tensor
    interleaved: bool
    slot_mapping: Tensor
    norm_last: bool


@triton.jit
def write_new(key, value, key_norm, cos_table, sin_table, positions, slots,
              key_cache, value_cache, k_scale, v_scale, head, heads, first, stop, offset,
              key_token, key_head, value_token, value_head, cos_row, sin_row, eps, norm_offset,
              kc_block, kc_head, kc_slot, vc_block, vc_head, vc_slot,
              BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
              V_DIM: tl.constexpr, V_DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
              INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
              FORMAT: tl.constexpr,
              K_SCALE_STRIDE: tl.constexpr, V_SCALE_STRIDE: tl.constexpr):  # fmt: skip
    """Write the keys and values of one head at positions [first, stop), then wait for all threads.

    `offset`: what to subtract from a position to get its token.
    """
    d = tl.arange(0, DIM_PAD)[None, :]
    one = tl.arange(0, 1)[:, None]
    for place in tl.range(first, stop):
        token = (place - offset).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        is_kept = slot >= 0  # a mask, not a branch: all loads are under way at once
        block = slot // BLOCK_SIZE
        inside = slot % BLOCK_SIZE
        position = tl.load(positions + token).to(tl.int64)
        mean, weight = None, key_norm
        if NORM > DIM:
            mean = mean_square(key + token * key_token, NORM)
            weight = key_norm + (head + one) * DIM
        x = turn(key + token * key_token + (head + one) * key_head, weight,
                 cos_table + position * cos_row, sin_table + position * sin_row, one == 0, eps,
                 norm_offset, NORM, DIM, DIM_PAD, WIDTH, INTERLEAVED, NORM_LAST, mean)  # fmt: skip
        kept = tl.where(is_kept, heads, 0)
        store_heads(
            key_cache + block * kc_block + inside * kc_slot + (head + one) * kc_head + d,
            x,
            slot_scale(k_scale, block, inside, kc_block, kc_slot, BLOCK_SIZE, FORMAT),
            head + one,
            kept,
            kc_head,
            (d < DIM) & is_kept,
            DIM,
            K_SCALE_STRIDE,
            FORMAT,
            True,
        )
        copy_heads(value + token * value_token,
                   value_cache + block * vc_block + inside * vc_slot, value_head, vc_head, kept,
                   slot_scale(v_scale, block, inside, vc_block, vc_slot, BLOCK_SIZE, FORMAT),
                   1, V_DIM, V_DIM_PAD, FORMAT, V_SCALE_STRIDE, False, head)  # fmt: skip
    barrier()


def rope_args(rope: Rope | None) -> dict[str, Any]:
    if rope is None:
        pointers = (
            "key", "value", "query_norm", "key_norm", "cos_table", "sin_table", "positions", "slots"
        )  # fmt: skip
        steps = ("key_token", "key_head", "value_token", "value_head", "cos_row", "sin_row")
        floats = ("eps", "norm_offset")
        return {
            **dict.fromkeys(pointers), **dict.fromkeys(steps, 0), **dict.fromkeys(floats, 0.0)
        }  # fmt: skip
    return {
        "key": rope.key, "value": rope.value,
        "query_norm": rope.query_norm, "key_norm": rope.key_norm,
        "cos_table": rope.cos_table, "sin_table": rope.sin_table,
        "positions": rope.positions, "slots": rope.slot_mapping,
        "key_token": rope.key.stride(0), "key_head": rope.key.stride(1),
        "value_token": rope.value.stride(0), "value_head": rope.value.stride(1),
        "cos_row": rope.cos_table.stride(0), "sin_row": rope.sin_table.stride(0),
        "eps": rope.eps, "norm_offset": rope.norm_offset,
    }  # fmt: skip


def rope_constants(rope: Rope | None) -> dict[str, Any]:
    return {
        "ROPE": rope is not None,
        "WIDTH": 0 if rope is None else rope.cos_table.shape[-1],
        "INTERLEAVED": rope is not None and rope.interleaved,
        "QUERY_NORM": 0 if rope is None else normed_together(rope.query_norm),
        "KEY_NORM": 0 if rope is None else normed_together(rope.key_norm),
        "NORM_LAST": rope is not None and rope.norm_last,
    }
