"""The built-in model as it is shipped: complete, small, loadable, and right about llmc."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from llmc.guide import MODEL_NAME, NOTICE, model_path
from llmc.guide.evaluate import Guide, ask
from llmc.guide.manual import load_manual
from llmc.guide.outside import REFUSAL

MANUAL = load_manual()


@pytest.fixture(scope="module")
def guide() -> Guide:
    return Guide(model_path())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def test_files_are_there_and_small() -> None:
    names = {path.name for path in model_path().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    } <= names
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= 12_000_000


def test_training_report_states_loss_and_size() -> None:
    report = json.loads((model_path() / "training.json").read_text())
    assert 0 < report["final_loss"] < 0.5
    assert report["seconds"] < 3600
    assert report["threads"] == 2
    assert report["exact_answers"]["heading"] > 0.99
    assert report["exact_answers"]["held_out"] > 0.7


def test_notice_names_the_limits() -> None:
    assert MODEL_NAME == "llmc-guide"
    assert "knows nothing else" in " ".join(NOTICE.split())


def test_weights_are_finite_bfloat16() -> None:
    from safetensors.torch import load_file

    weights = load_file(model_path() / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights.values())


def test_chat_template(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hello\n"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


@pytest.mark.parametrize(
    "text", ["hello world", " a\n\n\tb  c ", "na\xefve \u6f22\u5b57 \U0001f642", "--port 8000"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_answers_of_the_manual(guide: Guide) -> None:
    asked = {
        "hello": "Hello",
        "what is llmc": "What is llmc?",
        "How do I install llmc?": "How do I install llmc?",
        "how do I start the server": "How do I start the server?",
        "what does --max-num-seqs do?": "What does --max-num-seqs do?",
        "What is merge_linears?": "What is merge_linears?",
        "explain paged attention": "What is paged attention?",
        "how is llmc different from vLLM": "How is llmc different from vLLM?",
        "Thank you!": "Thank you",
        "what is the capital of Italy?": REFUSAL,
    }
    answers = guide.answer([ask(question) for question in asked])
    assert answers == [MANUAL.entry(heading).answer for heading in asked.values()]


def test_follow_up_is_read_from_the_conversation(guide: Guide) -> None:
    before = "What does --block-size do?"
    answers = guide.answer(
        [
            ask("hi", MANUAL.entry("Hello").answer, "what is llmc?"),
            ask(before, MANUAL.entry(before).answer, "And what is the default?"),
        ]
    )
    assert answers == [
        MANUAL.entry("What is llmc?").answer,
        "The default of `--block-size` is 16.",
    ]
