"""`write_segments`, `prepare_step`, `record_tokens` and `ban_words` in Triton, which maintain the
rows and a step's inputs on the device. The data is small; what matters is that each op is one
launch and that nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llmc.kernels.ban_words import ban_words
from llmc.kernels.prepare_step import WORK_WORDS, prepare_step
from llmc.kernels.record_tokens import record_tokens
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Launch, Plan, cdiv, interpreted, power_of_2
from llmc.kernels.triton.process_logits_kernels import banned_words
from llmc.kernels.write_segments import write_segments

_RUN = 1024  # words that a program copies at a time
_WRITERS = 128  # programs that share the runs, however many there are
_TOKENS = 256
_SAMPLES = 128


@triton.jit
def write_segments_kernel(memory, delta, BLOCK: tl.constexpr):
    """Each program copies every num_programs-th run: memory[target : target + length] =
    delta[source : source + length]."""
    count, first = tl.load(delta), tl.load(delta + 1)
    i = tl.arange(0, BLOCK)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        run = delta + first + number * 3
        target = tl.load(run).to(tl.int64)
        length = tl.load(run + 1)
        source = tl.load(run + 2)
        for begin in range(0, length, BLOCK):
            inside = begin + i < length
            words = tl.load(delta + source + begin + i, mask=inside)
            tl.store(memory + target + begin + i, words, mask=inside)


@triton.jit
def prepare_step_kernel(
    work, history, history_row, table, table_row, position_offset, token_ids, positions, slots,
    slots_group, query_start, context_len, block_table, block_table_group, block_table_request,
    request_row, logits_index, row, length,
    BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request, which writes the outputs for its line of `work`."""
    r = tl.program_id(0)
    line = work + r * WORDS
    at = tl.load(line).to(tl.int64)
    start, count, first = tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    context, sample, samples = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6)
    scored = tl.load(line + 7)
    offset = tl.load(position_offset + at)
    history += at * history_row
    table += at * table_row
    if r == 0:
        tl.store(query_start, 0)
    tl.store(query_start + r + 1, first + count)
    tl.store(context_len + r, context)
    tl.store(request_row + r, at)
    i = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        inside = begin + i < count
        position = start + begin + i
        live = inside & (context > 0)
        token = tl.load(history + position, mask=inside)
        out = first + begin + i
        for g in tl.static_range(GROUPS):
            block = tl.load(table + position // BLOCK_SIZE * GROUPS + g, mask=live, other=0)
            slot = tl.where(live, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(slots + g * slots_group + out, slot, mask=inside)
        tl.store(token_ids + out, token.to(tl.int64), mask=inside)
        tl.store(positions + out, (position + offset).to(tl.int64), mask=inside)
    block_table += r.to(tl.int64) * block_table_request
    blocks = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    for begin in range(0, blocks, BLOCK):
        inside = begin + i < blocks
        for g in tl.static_range(GROUPS):
            block = tl.load(table + (begin + i) * GROUPS + g, mask=inside)
            tl.store(block_table + g * block_table_group + begin + i, block, mask=inside)
    for begin in range(0, samples, BLOCK):
        inside = begin + i < samples
        token = count - samples + begin + i
        out = sample + begin + i
        tokens = tl.where((context > 0) & (begin + i >= scored), start + token + 1, 0)
        tl.store(logits_index + out, (first + token).to(tl.int64), mask=inside)
        tl.store(row + out, tl.zeros_like(out).to(tl.int64) + at, mask=inside)
        tl.store(length + out, tokens, mask=inside)


@triton.jit(do_not_specialize=["samples"])
def record_tokens_kernel(history, history_row, row, length, token, samples, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(length + s, mask=s < samples, other=0)
    at = tl.load(row + s, mask=place > 0, other=0)
    drawn = tl.load(token + s, mask=place > 0, other=0)
    tl.store(history + at * history_row + place, tl.maximum(drawn, 0).to(tl.int32), mask=place > 0)


@triton.jit
def ban_words_kernel(
    logits, logits_row, rows, lengths, history, history_row, prompt_len, words, vocab,
    WORDS: tl.constexpr, PLACES: tl.constexpr, WORDS_PAD: tl.constexpr,
):  # fmt: skip
    """One program per sample, vectorized over its words."""
    s = tl.program_id(0).to(tl.int64)
    r = tl.load(rows + s)
    words += r * WORDS * PLACES
    if tl.load(words + PLACES - 1) >= 0:
        prompt = tl.load(prompt_len + r)
        length = tl.load(lengths + s)
        last, banned = banned_words(words, history + r * history_row, prompt, length, WORDS, PLACES,
                                    WORDS_PAD)  # fmt: skip
        tl.store(logits + s * logits_row + last, float("-inf"), mask=banned & (last < vocab))


def plan_write(memory: Tensor, delta: Tensor) -> Plan[None]:
    launch = Launch(
        kernel=write_segments_kernel,
        grid=(_WRITERS,),
        args={"memory": memory, "delta": delta},
        constants={"BLOCK": _RUN},
    )
    return Plan(out=None, launches=(launch,))


def plan_prepare(
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
) -> Plan[None]:
    launch = Launch(
        kernel=prepare_step_kernel,
        grid=(work.shape[0],),
        args={
            "work": work, "history": history, "history_row": history.stride(0),
            "table": row_block_table, "table_row": row_block_table.stride(0),
            "position_offset": position_offset,
            "token_ids": token_ids, "positions": positions, "slots": slot_mapping,
            "slots_group": slot_mapping.stride(0),
            "query_start": query_start, "context_len": context_len,
            "block_table": block_table, "block_table_group": block_table.stride(0),
            "block_table_request": block_table.stride(1),
            "request_row": request_row, "logits_index": logits_index, "row": row,
            "length": length,
        },
        constants={
            "BLOCK_SIZE": block_size, "GROUPS": slot_mapping.shape[0], "WORDS": WORK_WORDS,
            "BLOCK": _TOKENS,
        },
    )  # fmt: skip
    return Plan(out=None, launches=(launch,))


def plan_record(history: Tensor, row: Tensor, length: Tensor, token: Tensor) -> Plan[None]:
    samples = row.shape[0]
    launch = Launch(
        kernel=record_tokens_kernel,
        grid=(cdiv(samples, _SAMPLES),),
        args={
            "history": history, "history_row": history.stride(0),
            "row": row, "length": length, "token": token, "samples": samples,
        },
        constants={"BLOCK": _SAMPLES},
    )  # fmt: skip
    return Plan(out=None, launches=(launch,))


def plan_ban(
    logits: Tensor,
    row: Tensor,
    length: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    words: Tensor,
    places: int,
) -> Plan[None]:
    num_words = words.shape[1] // places
    launch = Launch(
        kernel=ban_words_kernel,
        grid=(logits.shape[0],),
        args={
            "logits": logits, "logits_row": logits.stride(0), "rows": row, "lengths": length,
            "history": history, "history_row": history.stride(0), "prompt_len": prompt_len,
            "words": words, "vocab": logits.shape[1],
        },
        constants={"WORDS": num_words, "PLACES": places, "WORDS_PAD": power_of_2(num_words)},
        num_warps=1,
    )  # fmt: skip
    return Plan(out=None, launches=(launch,))


def _on_device(**arguments: Any) -> bool:
    kind = "cpu" if interpreted() else "cuda"
    return all(a.device.type == kind for a in arguments.values() if isinstance(a, Tensor))


for _op, _plan in (
    (write_segments, plan_write),
    (prepare_step, plan_prepare),
    (record_tokens, plan_record),
    (ban_words, plan_ban),
):
    define(_op, plan=_plan, supports=_on_device)
