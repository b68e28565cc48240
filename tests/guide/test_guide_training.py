"""The training script runs from the manual to a loadable model, and twice to the same weights."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from llmc.guide.conversations import QUESTION_WEIGHT, Conversations
from llmc.guide.manual import load_manual, normal_form
from llmc.guide.train import ARCHITECTURE, Training, learning_rate, run

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_two_runs_give_the_same_model(tmp_path: Path) -> None:
    architecture = {**json.loads(ARCHITECTURE.read_text()), **TINY}
    training = Training(num_steps=4, vocab_size=512, shapes=((2, 96), (1, 160)), num_texts=300)
    threads = torch.get_num_threads()
    weights = []
    try:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            report = run(architecture, training, folder)
            assert report["tokens"] == 2 * (2 * 96) + 2 * 160
            weights.append(load_file(folder / "model.safetensors"))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    first, second = weights
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    texts = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert texts[0] == texts[1]


def test_held_out_phrasings_are_never_asked() -> None:
    manual = load_manual()
    drawn = islice(Conversations(manual, Random(0)), 3000)
    asked = {
        normal_form(text.removesuffix("<|im_end|>\n"))
        for pieces in drawn
        for text, weight in pieces
        if weight == QUESTION_WEIGHT
    }
    assert len(asked) > 1000
    assert asked & manual.held_out == set()


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 1000) for step in range(1000)]
    peak = rates.index(max(rates))
    assert 90 <= peak <= 110
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < rates[peak] / 1000
