"""Masks that add a number for each key, and keep the keys of the highest numbers.

The numbers are computed of values, which in the first layer are equal where a token is repeated.
So no token is: of equal numbers `torch.topk` takes any.
"""

from __future__ import annotations

from pathlib import Path

import tiny_engine
import torch
from tiny_configs import save_random, tiny_config
from tiny_models import VOCAB, continue_greedily, load_reference

LENGTHS = (1, 5, 12, 19, 33, 70)
LIMITS = ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 24, "max_num_batched_tokens": 9})
KEPT = 32  # more than the tokens of the first capture, which therefore chooses nothing


def test_answers_are_those_of_transformers_in_texts_of_any_length(tmp_path: Path) -> None:
    config = tiny_config("doge")
    config.keep_window_size = KEPT
    path = save_random(config, tmp_path)
    model, gen = load_reference(path), torch.Generator().manual_seed(0)
    texts = [tuple((torch.randperm(VOCAB - 1, generator=gen)[:n] + 1).tolist()) for n in LENGTHS]
    expected = [continue_greedily(model, text, 1) for text in texts]
    running = tiny_engine.start(path, max_model_len=96)
    choices = [r for r in running.started.info.pass_reports if "find_key_biases" in r]
    assert f"the {KEPT} highest chosen" in choices[0]
    for limits in LIMITS:
        got = tiny_engine.generate(running.engine(**limits), texts, 1)
        skipped, wrong = tiny_engine.differences(expected, got)
        assert not wrong and not skipped, f"{limits}: {'; '.join(wrong)}"
