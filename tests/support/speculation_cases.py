"""Sampling settings and engine limits with which draft tokens must not change any output."""

from __future__ import annotations

from typing import Any

import tiny_models

PROMPTS = tiny_models.prompts((1, 5, 19, 33, 12, 30))
NUM_TOKENS = 16
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 7, "top_p": 0.95, "logprobs": 3},
    "processed": {
        "temperature": 0.8,
        "seed": 11,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": {3: 2.0, 4: -5.0},
        "bad_words_token_ids": [[3, 3], [5]],
        "min_tokens": 6,
        "stop_token_ids": list(range(20, 40)),
    },
}
LIMITS: dict[str, dict[str, int]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 9},
    "few-rows": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    "few-blocks": {"num_blocks": 14, "max_num_batched_tokens": 12},
}
