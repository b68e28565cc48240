"""`add_lora` in Triton: two grouped products over rows sorted by adapter.

Rows are sorted on the device, as in `expert_linear`. Rows without an adapter sort before the first
offset and have no tile, so a step without adapters only sorts. The product with A is kept in
float32 between the two kernels. Each expert of a slot is treated as a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.add_lora import add_lora, experts_as_slots
from llmc.kernels.triton.attention_plan import at, locate
from llmc.kernels.triton.define import (
    define,
    dot_precision,
    needs_upcast,
    on_device,
    same_dtype,
    supports_tensors,
)
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2

_BLOCK_M, _BLOCK_N, _BLOCK_K = 16, 64, 64
_MAX_SLOTS = 8192  # limited because every program counts the rows of all slots


@triton.jit
def _tile(offsets, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """The slot of this program's rows, the sorted index of the first row, and the row count."""
    s = tl.arange(0, SLOTS_PAD)
    begin = tl.load(offsets + s, mask=s < SLOTS, other=0)
    count = tl.load(offsets + s + 1, mask=s < SLOTS, other=0) - begin
    slot, tile = locate(tl.program_id(0), (count + BLOCK_M - 1) // BLOCK_M, SLOTS_PAD)
    first = at(begin, slot, SLOTS_PAD) + tile * BLOCK_M
    return slot, first, at(count, slot, SLOTS_PAD) - tile * BLOCK_M


@triton.jit
def lora_a_kernel(
    x, a, low, order, offsets, x_row, K: tl.constexpr, LOWS: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """low [sorted rows, LOWS] float32 = x A, for the ranks of all parts."""
    slot, first, rows = _tile(offsets, SLOTS, SLOTS_PAD, BLOCK_M)
    if slot >= SLOTS:
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
    weight = a + (slot.to(tl.int64) * LOWS + n[None, :]) * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        left = tl.load(
            x + row[:, None] * x_row + k[None, :],
            mask=(m < rows)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        right = tl.load(weight + k[:, None], mask=(k < K)[:, None] & (n < LOWS)[None, :], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    tl.store(
        low + (first + m)[:, None] * LOWS + n[None, :],
        acc,
        mask=(m < rows)[:, None] & (n < LOWS)[None, :],
    )


@triton.jit
def lora_b_kernel(
    low, b, out, bounds, order, offsets, N: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, RANK_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out += low B, where each part's columns use the part's own ranks."""
    slot, first, rows = _tile(offsets, SLOTS, SLOTS_PAD, BLOCK_M)
    if slot >= SLOTS:
        return
    m = tl.arange(0, BLOCK_M)
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK_PAD)
    row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
    weight = tl.load(
        b + (slot.to(tl.int64) * RANK + r[:, None]) * N + n[None, :],
        mask=(r < RANK)[:, None] & (n < N)[None, :],
        other=0.0,
    ).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.range(0, PARTS):
        begin = tl.load(bounds + part)
        end = tl.load(bounds + part + 1)
        if (begin < n0 + BLOCK_N) & (end > n0):
            left = tl.load(
                low + (first + m)[:, None] * (PARTS * RANK) + part * RANK + r[None, :],
                mask=(m < rows)[:, None] & (r < RANK)[None, :],
                other=0.0,
            )
            mine = tl.where(((n >= begin) & (n < end))[None, :], weight, 0.0)
            acc = tl.dot(left, mine, acc, input_precision="ieee")
    place = out + row[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    old = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (old + acc).to(out.dtype.element_ty), mask=mask)


def plan(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    bounds: Tensor,
    adapter: Tensor,
    expert: Tensor | None = None,
) -> Plan[None]:
    if expert is not None:
        a, b, adapter = experts_as_slots(a, b, adapter, expert)
    rows, (slots, parts, rank, k) = adapter.shape[0], a.shape
    n = b.shape[2]
    given = x.reshape(rows, k)
    ordered, order = adapter.sort(stable=True)
    # invalid slots sort before the first offset or after the last
    edges = torch.arange(1, slots + 2, device=x.device, dtype=ordered.dtype)
    offsets = torch.searchsorted(ordered, edges).int()
    low = torch.empty(rows, parts * rank, dtype=torch.float32, device=x.device)
    # a slot without rows has no tile, and rounding up adds less than one tile per slot
    tiles = min(rows, rows // _BLOCK_M + slots)
    shared = {
        "SLOTS": slots, "SLOTS_PAD": power_of_2(slots), "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N,
    }  # fmt: skip
    first = Launch(
        kernel=lora_a_kernel,
        grid=(tiles, cdiv(parts * rank, _BLOCK_N)),
        args={
            "x": given, "a": a, "low": low, "order": order, "offsets": offsets,
            "x_row": given.stride(0),
        },
        constants={
            "K": k, "LOWS": parts * rank, "BLOCK_K": _BLOCK_K,
            "PRECISION": dot_precision(x.dtype),
            "UPCAST": needs_upcast(x.dtype), **shared,
        },
        num_warps=4,
        num_stages=3,
    )  # fmt: skip
    second = Launch(
        kernel=lora_b_kernel,
        grid=(tiles, cdiv(n, _BLOCK_N)),
        args={
            "low": low, "b": b, "out": out.view(rows, n), "bounds": bounds, "order": order,
            "offsets": offsets,
        },
        constants={
            "N": n, "RANK": rank, "PARTS": parts, "RANK_PAD": max(16, power_of_2(rank)), **shared,
        },
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return Plan(out=None, launches=(first, second))


def _supports(
    *,
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    bounds: Tensor,
    adapter: Tensor,
    expert: Tensor | None,
) -> bool:
    return (
        supports_tensors(out, x, a, b)
        and same_dtype(out, x, a, b)
        and out.is_contiguous()
        and on_device(bounds, adapter)
        and a.shape[2] <= 256  # B's tile for all ranks is kept in registers
        and (expert is None or (on_device(expert) and a.shape[0] * a.shape[1] <= _MAX_SLOTS))
    )


define(add_lora, plan=plan, supports=_supports)
