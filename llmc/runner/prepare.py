"""The rows and a plan -> the packed tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.engine.plan import StepPlan
from llmc.runner.rows import RowTables


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Step inputs that change every step (design: the step function), T tokens of R rows.

    `num_sampled` of the S logits rows belong to requests; the rest pad a bucket.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, -1 for padding
    query_start: Tensor  # [R + 1] int32
    context_len: Tensor  # [R] int32, 0 for padding
    block_table: Tensor  # [R, blocks of the longest context] int32
    logits_index: Tensor  # [S] int64
    row: Tensor  # [S] int64
    length: Tensor  # [S] int32
    num_sampled: int


def prepare(rows: RowTables, plan: StepPlan, padding: int = 0, min_blocks: int = 1) -> PackedStep:
    """`padding` rows are added that compute and sample one dummy token each.

    `min_blocks` is the least width of the block table (compiled steps take no width of 1).
    """
    work, device = plan.work, rows.device
    padded_rows = len(work) + padding
    delta = torch.tensor(
        [
            [w.row for w in work] + [rows.padding_row] * padding,
            [w.start for w in work] + [0] * padding,
            [w.num_tokens for w in work] + [1] * padding,
        ],
        dtype=torch.int64,
        device=device,
    )
    row, start, count = delta[0], delta[1], delta[2]
    context = start + count
    if padding:
        context[len(work) :] = 0
    query_start = torch.zeros(padded_rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(count, 0, dtype=torch.int32, out=query_start[1:])
    if plan.is_decode:
        token_row, positions = row, start
        sampled = torch.arange(padded_rows, device=device)
    else:
        total = plan.num_tokens + padding
        token_row = torch.repeat_interleave(row, count, output_size=total)
        first = torch.repeat_interleave(start - query_start[:-1], count, output_size=total)
        positions = first + torch.arange(total, device=device)
        which = [i for i, w in enumerate(work) if w.sample]
        which += range(len(work), padded_rows)
        sampled = torch.tensor(which, dtype=torch.int64, device=device)
    size = rows.block_size
    widest = max((w.start + w.num_tokens + size - 1) // size for w in work)
    block = rows.block_table[token_row, positions // size].long()
    slots = block * size + positions % size
    if padding:
        slots[slots.shape[0] - padding :] = -1
    return PackedStep(
        token_ids=rows.tables["history"][token_row, positions].long(),
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        context_len=context.int(),
        block_table=rows.block_table[row, : max(widest, min_blocks)],
        logits_index=(query_start[1:].long() - 1)[sampled],
        row=row[sampled],
        length=context[sampled].int(),
        num_sampled=len(sampled) - padding,
    )
