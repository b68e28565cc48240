"""`token_logprobs` in Triton: one pass over the logits, then one program per row."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.kernels.token_logprobs import shape, token_logprobs
from llmc.kernels.triton.configs import LOGITS_BLOCK
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.token_logprobs_kernels import chunk_kernel, report_kernel

Reports = tuple[Tensor, Tensor, Tensor, Tensor]


def plan(logits: Tensor, token: Tensor, k: int) -> Plan[Reports]:
    rows, vocab = logits.shape
    block = min(LOGITS_BLOCK, power_of_2(vocab, 16))
    chunks = cdiv(vocab, block)
    out = shape(logits=logits, k=k)
    chosen, rank, ids, values = out
    shared = {
        "logits": logits, "tokens": token, "logits_row": logits.stride(0), "vocab": vocab,
        "chunk_max": logits.new_empty(rows, chunks, dtype=torch.float32),
        "chunk_arg": logits.new_empty(rows, chunks, dtype=torch.int32),
        "chunk_sum": logits.new_empty(rows, chunks, dtype=torch.float32),
        "chunk_above": logits.new_empty(rows, chunks, dtype=torch.int32),
        "chunks": chunks,
    }  # fmt: skip
    stats = Launch(
        kernel=chunk_kernel, grid=(rows, chunks), args=shared, constants={"BLOCK": block}
    )
    report = Launch(
        kernel=report_kernel,
        grid=(rows,),
        args={
            **shared, "chosen": chosen, "ranks": rank, "top_ids": ids, "top_values": values, "k": k,
        },
        constants={"BLOCK": block, "CHUNKS": power_of_2(chunks)},
    )  # fmt: skip
    return Plan(out=out, launches=(stats, report))


def _supports(*, logits: Tensor, token: Tensor, **others: object) -> bool:
    return supports_tensors(logits) and token.is_contiguous()


define(token_logprobs, plan=plan, supports=_supports)
