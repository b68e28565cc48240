"""`process_logits` in Triton: four small launches; rows without penalties do work in only one."""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.kernels.process_logits import process_logits
from llmc.kernels.triton.configs import HISTORY_BLOCK, LOGITS_BLOCK
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.process_logits_kernels import (
    apply_kernel,
    bias_kernel,
    clear_kernel,
    count_kernel,
)


def plan(
    logits: Tensor,
    row: Tensor,
    length: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias_token: Tensor,
    bias_value: Tensor,
    bias_until: Tensor,
    has_mask: Tensor,
    mask: Tensor,
) -> Plan[Tensor]:
    samples, vocab = logits.shape
    block = min(LOGITS_BLOCK, power_of_2(vocab, 16))
    grid = (samples, cdiv(vocab, block))
    out = logits.new_empty(samples, vocab, dtype=torch.float32)
    counted = {
        "counts": logits.new_empty(samples, vocab, dtype=torch.int32), "rows": row,
        "repetition": repetition, "presence": presence, "frequency": frequency, "vocab": vocab,
    }  # fmt: skip
    masked = {"has_mask": has_mask, "allowed": mask, "mask_row": mask.stride(0)}
    clear = Launch(kernel=clear_kernel, grid=grid, args=counted, constants={"BLOCK": block})
    count = Launch(
        kernel=count_kernel,
        grid=(samples, cdiv(history.shape[1], HISTORY_BLOCK)),
        args={
            **counted, "lengths": length, "history": history, "prompt_len": prompt_len,
            "history_row": history.stride(0),
        },
        constants={"BLOCK": HISTORY_BLOCK},
    )  # fmt: skip
    apply = Launch(
        kernel=apply_kernel,
        grid=grid,
        args={**counted, **masked, "logits": logits, "out": out, "logits_row": logits.stride(0)},
        constants={"BLOCK": block},
    )
    biases = bias_token.shape[1]
    bias = Launch(
        kernel=bias_kernel,
        grid=(samples if biases else 0,),
        args={
            **masked, "out": out, "rows": row, "lengths": length, "prompt_len": prompt_len,
            "bias_token": bias_token, "bias_value": bias_value, "bias_until": bias_until,
            "bias_row": bias_token.stride(0), "vocab": vocab,
        },
        constants={"BIASES": biases, "BIASES_PAD": power_of_2(biases)},
        num_warps=1,
    )  # fmt: skip
    return Plan(out=out, launches=(clear, count, apply, bias))


def _supports(*, logits: Tensor, **tables: Tensor) -> bool:
    return supports_tensors(logits) and all(t.is_contiguous() for t in tables.values())


define(process_logits, plan=plan, supports=_supports)
