"""`process_logits` in Triton; rows without penalties neither count tokens nor read counts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmc.kernels.process_logits import process_logits
from llmc.kernels.triton import dependent_launch
from llmc.kernels.triton.configs import HISTORY_BLOCK
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Launch, Plan, cdiv, power_of_2
from llmc.kernels.triton.process_logits_kernels import process_kernel
from llmc.kernels.triton.sample import logits_block


def plan(
    logits: Tensor,
    row: Tensor,
    length: Tensor,
    history: Tensor,
    prompt_len: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repeat_last_n: Tensor,
    bias_token: Tensor,
    bias_value: Tensor,
    bias_until: Tensor,
    has_mask: Tensor,
    mask: Tensor,
) -> Plan[Tensor]:
    tables = (history, prompt_len, repetition, presence, frequency, repeat_last_n)
    biases = (bias_token, bias_value, bias_until)
    args = (*tables, *biases, has_mask, mask)
    out, launch = process_launch(logits, row, length, *args, words=None, places=1, stats={})
    return Plan(out=out, launches=(launch,))


def process_launch(
    logits: Tensor, row: Tensor, length: Tensor, history: Tensor, prompt_len: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor, repeat_last_n: Tensor,
    bias_token: Tensor, bias_value: Tensor, bias_until: Tensor, has_mask: Tensor, mask: Tensor,
    *, words: Tensor | None, places: int, stats: Mapping[str, Tensor],
) -> tuple[Tensor, Launch]:  # fmt: skip
    """The processed logits, and the launch that fills them and `stats` (as of `chunk_stats`)."""
    samples, vocab = logits.shape
    block = logits_block(vocab)
    out = logits.new_empty(samples, vocab, dtype=torch.float32)
    biases, num_words = bias_token.shape[1], 0 if words is None else words.shape[1] // places
    pdl = dependent_launch.applies_to(logits.device)
    launch = Launch(
        kernel=process_kernel,
        grid=(samples, cdiv(vocab, block)),
        args={
            "logits": logits, "out": out,
            "counts": logits.new_empty(samples, vocab, dtype=torch.int32),
            "chunk_max": None, "chunk_arg": None, **stats, "rows": row, "lengths": length,
            "history": history, "prompt_len": prompt_len, "repetition": repetition,
            "presence": presence, "frequency": frequency, "repeat_last_n": repeat_last_n,
            "bias_token": bias_token, "bias_value": bias_value, "bias_until": bias_until,
            "has_mask": has_mask, "allowed": mask, "words": words, "logits_row": logits.stride(0),
            "history_row": history.stride(0), "bias_row": bias_token.stride(0),
            "mask_row": mask.stride(0), "vocab": vocab, "chunks": cdiv(vocab, block),
        },
        constants={
            "BLOCK": block, "HISTORY": HISTORY_BLOCK, "BIASES": biases,
            "BIASES_PAD": power_of_2(biases), "WORDS": num_words, "PLACES": places,
            "WORDS_PAD": power_of_2(num_words), "STATS": bool(stats), "PDL": pdl,
        },
        pdl=pdl,
    )  # fmt: skip
    return out, launch


def _supports(*, logits: Tensor, **tables: Tensor) -> bool:
    return supports_tensors(logits) and all(t.is_contiguous() for t in tables.values())


define(process_logits, plan=plan, supports=_supports)
