"""`prepare_step`: build a step's packed inputs from the row tables and a few words per request.

One launch before the model; the amount of data sent by the host does not depend on the context.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmc.kernels.registry import Case, op
from llmc.kernels.step_inputs import PREPARED

# row, start, num_tokens, query_start, context_len, first_sample, num_samples, num_scored
WORK_WORDS = 8


@op(mutates=tuple(PREPARED))
def prepare_step(
    work: Tensor,
    history: Tensor,
    row_block_table: Tensor,
    position_offset: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    request_row: Tensor,
    logits_index: Tensor,
    row: Tensor,
    length: Tensor,
) -> None:
    """Fill the packed inputs of a step of R requests, T tokens and S samples.

    work [R, 8] int32 has one line per request, in packed order: its row; the position of its first
    token; its number of tokens; their offset in the packed tokens; its context after the step (0:
    padding); the index of its first sample; its number of samples, at its last tokens; and how many
    of them, the first ones, are only scored.
    history [N, L] int32, row_block_table [N, B * G] int32 and position_offset [N] int32 are indexed
    by row: a block of tokens has one physical block in each of G groups of layers, side by side.

    Outputs: the inputs of `step_inputs.PREPARED`; positions include the row's offset; slot_mapping
    [G, T] and block_table [G, R, B] are for all groups, the table only up to each context. length
    is 0 for padding and for samples that are only scored: tokens drawn there are ignored.
    """
    groups = slot_mapping.shape[0]
    starts = [0]
    for r, line in enumerate(work.tolist()):
        at, start, count, first, context, sample, samples, scored = line
        table = row_block_table[at].view(-1, groups).T
        place = torch.arange(start, start + count, device=work.device)
        token_ids[first : first + count] = history[at, place].long()
        positions[first : first + count] = place + position_offset[at]
        if context > 0:
            block = table[:, place // block_size].long()
            slot_mapping[:, first : first + count] = block * block_size + place % block_size
        else:
            slot_mapping[:, first : first + count] = -1
        blocks = (context + block_size - 1) // block_size
        block_table[:, r, :blocks] = table[:, :blocks]
        context_len[r], request_row[r] = context, at
        starts.append(first + count)
        for i in range(samples):
            token = count - samples + i
            logits_index[sample + i], row[sample + i] = first + token, at
            length[sample + i] = start + token + 1 if context > 0 and i >= scored else 0
    query_start[: len(starts)] = torch.tensor(starts, dtype=torch.int32, device=work.device)


def work_lines(
    requests: list[tuple[int, int, int, int, int]], padding: int, padding_row: int
) -> Tensor:
    """`work` for requests given as (row, start, tokens, samples, scored), then padding requests."""
    lines = []
    first = sample = 0
    for row, start, count, samples, scored in requests:
        lines.append([row, start, count, first, start + count, sample, samples, scored])
        first, sample = first + count, sample + samples
    for i in range(padding):
        lines.append([padding_row, 0, 1, first + i, 0, sample + i, 1, 0])
    return torch.tensor(lines, dtype=torch.int32)


@prepare_step.cases
def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    gen = torch.Generator(device="cpu").manual_seed(0)
    rows, context, block_size = 6, 48, 4
    history = torch.randint(0, 1000, (rows, context + 1), generator=gen).int()
    blocks = context // block_size
    for groups, requests, padding in (
        (1, [(3, 0, 1, 1, 0)], 0),
        (2, [(0, 7, 1, 1, 0), (4, 47, 1, 1, 0), (2, 0, 1, 1, 0)], 2),
        (1, [(1, 0, 48, 1, 0), (2, 5, 9, 0, 0), (0, 30, 4, 4, 0), (4, 3, 1, 1, 0)], 0),
        (3, [(1, 0, 48, 1, 0), (2, 5, 9, 0, 0), (0, 30, 4, 4, 0), (4, 3, 1, 1, 0)], 1),
        (1, [(1, 8, 3, 0, 0)], 1),
        (2, [(0, 0, 5, 5, 5), (2, 6, 7, 7, 6)], 0),
    ):
        table = torch.randperm(rows * blocks * groups, generator=gen).int().view(rows, -1)
        work = work_lines(requests, padding, rows - 1)
        num = len(work)
        tokens = int(work[:, 2].sum())
        samples = int(work[:, 6].sum())
        longs = [torch.zeros(n, dtype=torch.int64) for n in (tokens, tokens, num)]
        yield (
            work.to(device),
            history.to(device),
            table.to(device),
            torch.tensor([0, 0, 40, 0, 0, 0], dtype=torch.int32, device=device),
            block_size,
            longs[0].to(device),
            longs[1].to(device),
            torch.zeros(groups, tokens, dtype=torch.int64, device=device),
            torch.zeros(num + 1, dtype=torch.int32, device=device),
            torch.zeros(num, dtype=torch.int32, device=device),
            torch.zeros(groups, num, blocks, dtype=torch.int32, device=device),
            longs[2].to(device),
            torch.zeros(samples, dtype=torch.int64, device=device),
            torch.zeros(samples, dtype=torch.int64, device=device),
            torch.zeros(samples, dtype=torch.int32, device=device),
        )
