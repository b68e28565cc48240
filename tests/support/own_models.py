"""Serves saved models with code of their own, and compares them with that code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmc import LLM, SamplingParams
from llmc.lora_request import LoRARequest

PROMPTS = ([3, 9, 4, 33, 12, 7, 3], [5], [3, 3, 8, 60, 1, 22, 14, 2, 9])


def assert_served_logits(
    path: Path,
    logits: Callable[[Tensor], Tensor],
    *,
    adapter: LoRARequest | None = None,
    **options: Any,
) -> None:
    """Check the log-probabilities of greedy answers by the model at `path`, in float32 and steps of
    few tokens. logits: what its code gives [1, T, V] for ids [1, T], with the adapter."""
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=4)
    with LLM(
        str(path),
        dtype="float32",
        device="cpu",
        opt_level=0,
        kv_cache_memory=16 << 20,
        max_num_batched_tokens=8,
        block_size=4,
        **options,
    ) as llm:
        prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [answer] = output.outputs
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            wanted = logits(ids)[0, len(prompt) - 1 :].log_softmax(-1)
        assert answer.logprobs is not None
        for want, found in zip(wanted, answer.logprobs, strict=False):
            for token, one in found.items():
                assert one.logprob == pytest.approx(float(want[token]), abs=1e-4)
