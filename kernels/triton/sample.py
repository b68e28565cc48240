"""`sample` in Triton: one pass over the logits for statistics, then one program per row samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmc.kernels.sample import GREEDY_BELOW, sample
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import LOGITS_BLOCK, row_warps
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.sample_draw import draw_kernel
from llmc.kernels.triton.sample_stats import stats_kernel

_GROUP = 4  # chunks that a program reads at a time


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
    block = logits_block(vocab)
    chunks = cdiv(vocab, block)
    shared = {
        "logits": logits, **chunk_stats(logits, chunks), "logits_row": logits.stride(0),
        "vocab": vocab, "chunks": chunks,
    }  # fmt: skip
    pdl = dependent_launch.applies_to(logits.device)
    stats = Launch(
        kernel=stats_kernel,
        grid=(rows, chunks),
        args=shared,
        constants={"BLOCK": block, "PDL": pdl},
        pdl=pdl,
    )
    parameters = temperature, top_k, top_p, min_p, seed
    token, draw = draw_launch(shared, None, parameters, position, 0)
    return Plan(out=token, launches=(stats, draw))


def chunk_stats(logits: Tensor, chunks: int) -> dict[str, Tensor]:
    shape = logits.shape[0], chunks
    return {
        "chunk_max": logits.new_empty(shape, dtype=torch.float32),
        "chunk_arg": logits.new_empty(shape, dtype=torch.int32),
    }


def draw_launch(
    shared: Mapping[str, Any], row: Tensor | None, parameters: Sequence[Tensor],
    position: Tensor, ahead: int,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """The tokens, and the launch that draws them. shared: the logits and their statistics."""
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds")
    logits, chunks = shared["logits"], shared["chunks"]
    token = logits.new_empty(logits.shape[0], dtype=torch.int64)
    block = logits_block(shared["vocab"])
    group = min(_GROUP, power_of_2(chunks))
    pdl = dependent_launch.applies_to(logits.device)
    launch = Launch(
        kernel=draw_kernel,
        grid=(logits.shape[0],),
        args={
            **shared, "rows": row, **dict(zip(names, parameters, strict=True)),
            "positions": position, "tokens": token,
        },
        constants={
            "GREEDY_BELOW": GREEDY_BELOW, "GROUP": group, "BLOCK": block,
            "CHUNKS": power_of_2(chunks), "AHEAD": ahead, "PDL": pdl,
        },
        num_warps=16 if group * block > 4096 else row_warps(group * block),
        pdl=pdl,
    )  # fmt: skip
    return token, launch


def logits_block(vocab: int) -> int:
    return min(LOGITS_BLOCK, power_of_2(vocab, 16))


def _supports(*, logits: Tensor, **parameters: Tensor) -> bool:
    return supports_tensors(logits) and all(t.is_contiguous() for t in parameters.values())


define(sample, plan=plan, supports=_supports)
