"""`sample` in Triton: one pass over the logits for statistics, then one program per row samples."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.kernels.sample import GREEDY_BELOW, sample
from llmc.kernels.triton.configs import LOGITS_BLOCK
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.sample_draw import draw_kernel
from llmc.kernels.triton.sample_stats import stats_kernel


def plan(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Plan[Tensor]:
    rows, vocab = logits.shape
    block = min(LOGITS_BLOCK, power_of_2(vocab, 16))
    chunks = cdiv(vocab, block)
    chunk_max = logits.new_empty(rows, chunks, dtype=torch.float32)
    chunk_arg = logits.new_empty(rows, chunks, dtype=torch.int32)
    token = logits.new_empty(rows, dtype=torch.int64)
    shared = {
        "logits": logits, "chunk_max": chunk_max, "chunk_arg": chunk_arg,
        "logits_row": logits.stride(0), "vocab": vocab, "chunks": chunks,
    }  # fmt: skip
    stats = Launch(
        kernel=stats_kernel,
        grid=(rows, chunks),
        args=shared,
        constants={"BLOCK": block},
    )
    draw = Launch(
        kernel=draw_kernel,
        grid=(rows,),
        args={
            **shared, "temperatures": temperature, "top_ks": top_k, "top_ps": top_p,
            "min_ps": min_p, "seeds": seed, "positions": position, "tokens": token,
        },
        constants={"GREEDY_BELOW": GREEDY_BELOW, "BLOCK": block, "CHUNKS": power_of_2(chunks)},
        num_warps=8,
    )  # fmt: skip
    return Plan(out=token, launches=(stats, draw))


def _supports(*, logits: Tensor, **parameters: Tensor) -> bool:
    return supports_tensors(logits) and all(t.is_contiguous() for t in parameters.values())


define(sample, plan=plan, supports=_supports)
