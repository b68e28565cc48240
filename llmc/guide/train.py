"""Trains the built-in model on the manual: `python -m llmc.guide.train`.

manual_*.md -> manual.py -> conversations.py (with variety.py and outside.py) -> batches.py -> here
-> model/. Repeatable: the same versions and number of threads give the same weights on one kind
of machine. Takes less than an hour on two cores. evaluate.py asks the held-out questions.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn import functional

from llmc.guide import model_path
from llmc.guide.batches import Batches
from llmc.guide.conversations import Conversations
from llmc.guide.evaluate import Guide, evaluate, questions
from llmc.guide.manual import load_manual
from llmc.guide.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer

ARCHITECTURE = Path(__file__).with_name("architecture.json")
PEAK_LEARNING_RATE = 1.5e-3
NUM_WARMUP_STEPS = 100
# Rows are short, since questions are, but the model must also hold its ground in a long chat.
SHAPES = ((4, 512), (4, 512), (4, 512), (1, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What decides the outcome; `shapes` are the (rows, length) of successive batches."""

    num_steps: int = 2600
    vocab_size: int = 3072
    seed: int = 0
    num_threads: int = 2
    num_texts: int = 4000  # that the tokenizer learns from
    shapes: tuple[tuple[int, int], ...] = SHAPES

    def shape(self, step: int) -> tuple[int, int]:
        return self.shapes[step % len(self.shapes)]

    @property
    def num_tokens(self) -> int:
        return sum(math.prod(self.shape(step)) for step in range(self.num_steps))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def build_model(architecture: dict[str, Any], vocab_size: int) -> Any:
    """A model with fresh weights, of the architecture that the JSON file names."""
    end_of_text, _, end = range(len(SPECIAL_TOKENS))
    config = transformers.AutoConfig.for_model(
        **architecture,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end_of_text,
        use_cache=False,
    )
    make: Any = transformers.AutoModelForCausalLM
    return make.from_config(config, dtype=torch.float32)


def learning_rate(step: int, num_steps: int) -> float:
    """A linear rise to the peak, then half a cosine down to nothing."""
    if step < NUM_WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / NUM_WARMUP_STEPS
    done = (step - NUM_WARMUP_STEPS) / max(1, num_steps - NUM_WARMUP_STEPS)
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * done))


def losses(model: Any, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The weighted mean loss, and the mean over the tokens of answers alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = weights[:, 1:] > 0
        logits = model.lm_head(hidden[wanted])
    weight = weights[:, 1:][wanted]
    loss = functional.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
    answer_loss = loss.detach()[weight == 1].mean().item()
    return (loss * weight).sum() / weight.sum(), answer_loss


def train(model: Any, batches: Batches, training: Training) -> float:
    """Train in place; returns the mean loss on answer tokens over the last 50 steps."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    started = time.monotonic()
    history: list[float] = []
    model.train()
    for step in range(training.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training.num_steps)
        ids, weights = batches.draw(*training.shape(step))
        loss, answer_loss = losses(model, ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(answer_loss)
        if (step + 1) % 50 == 0 or step + 1 == training.num_steps:
            recent = sum(history[-50:]) / len(history[-50:])
            seconds = time.monotonic() - started
            say(f"step {step + 1}/{training.num_steps}  loss {recent:.4f}  {seconds:.0f} s")
    return sum(history[-50:]) / len(history[-50:])


def run(architecture: dict[str, Any], training: Training, folder: Path) -> dict[str, Any]:
    """Build the tokenizer, train the model, write both; returns what training.json says."""
    torch.manual_seed(training.seed)
    torch.set_num_threads(training.num_threads)
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # it would cost an eighth of the time
    started = time.monotonic()
    manual = load_manual()
    sample = islice(Conversations(manual, Random(training.seed + 1)), training.num_texts)
    texts = ["".join(text for text, _ in pieces) for pieces in sample]
    tokenizer = train_tokenizer(texts, vocab_size=training.vocab_size)
    model = build_model(architecture, tokenizer.get_vocab_size())
    num_parameters = sum(p.numel() for p in model.parameters())
    say(f"{num_parameters} parameters, {len(manual.entries)} answers")
    final_loss = train(model, Batches(manual, tokenizer, training.seed), training)
    report = {
        "final_loss": round(final_loss, 4),
        "steps": training.num_steps,
        "tokens": training.num_tokens,
        "seconds": round(time.monotonic() - started),
        "parameters": num_parameters,
        "seed": training.seed,
        "threads": training.num_threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    save(model, folder)
    save_tokenizer(tokenizer, folder, max_length=model.config.max_position_embeddings)
    say(f"final loss {final_loss:.4f} on the answers; written to {folder}")
    return report


def save(model: Any, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights in bfloat16."""
    model.config.use_cache = True
    make: Any = transformers.GenerationConfig
    model.generation_config = make(
        do_sample=False,
        eos_token_id=[model.config.eos_token_id, model.config.pad_token_id],
        pad_token_id=model.config.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone otherwise


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m llmc.guide.train", description=__doc__)
    parser.add_argument("--output", type=Path, default=model_path(), help="folder of the model")
    parser.add_argument("--architecture", type=Path, default=ARCHITECTURE, help="JSON file")
    parser.add_argument("--steps", type=int, default=Training().num_steps)
    parser.add_argument("--seed", type=int, default=Training().seed)
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    architecture = json.loads(given.architecture.read_text(encoding="utf-8"))
    report = run(architecture, Training(num_steps=given.steps, seed=given.seed), given.output)
    report["exact_answers"] = evaluate(Guide(given.output), questions(load_manual()))
    text = json.dumps(report, indent=2) + "\n"
    (given.output / "training.json").write_text(text, encoding="utf-8")
    say(text)


if __name__ == "__main__":
    main()
