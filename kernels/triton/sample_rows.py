"""`sample_rows` in Triton: two launches from the model's logits to the tokens."""

from __future__ import annotations

from torch import Tensor

from llmc.kernels.sample_rows import sample_rows
from llmc.kernels.triton.define import define, supports_tensors
from llmc.kernels.triton.launch import Plan, cdiv
from llmc.kernels.triton.process_logits import process_launch
from llmc.kernels.triton.sample import chunk_stats, draw_launch, logits_block


def plan(
    logits: Tensor, row: Tensor, length: Tensor, history: Tensor, prompt_len: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor, repeat_last_n: Tensor,
    bias_token: Tensor, bias_value: Tensor, bias_until: Tensor, has_mask: Tensor, mask: Tensor,
    words: Tensor, places: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, ahead: int,
) -> Plan[Tensor]:  # fmt: skip
    vocab = logits.shape[1]
    chunks = cdiv(vocab, logits_block(vocab))
    stats = chunk_stats(logits, chunks)
    processed, process = process_launch(
        logits, row, length, history, prompt_len, repetition, presence, frequency, repeat_last_n,
        bias_token, bias_value, bias_until, has_mask, mask, words=words, places=places, stats=stats,
    )  # fmt: skip
    shared = {
        "logits": processed, **stats, "logits_row": processed.stride(0), "vocab": vocab,
        "chunks": chunks,
    }  # fmt: skip
    token, draw = draw_launch(shared, row, (temperature, top_k, top_p, min_p, seed), length, ahead)
    return Plan(out=token, launches=(process, draw))


def _supports(*, logits: Tensor, places: int, ahead: int, **tables: Tensor) -> bool:
    return supports_tensors(logits) and all(t.is_contiguous() for t in tables.values())


define(sample_rows, plan=plan, supports=_supports)
