"""Asks the built-in model the questions it was never trained on: `python -m llmc.guide.evaluate`.

An answer counts when greedy decoding gives the manual's answer, letter by letter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from llmc.guide import model_path
from llmc.guide.manual import Manual, load_manual
from llmc.guide.outside import HELD_OUT, REFUSAL

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation that ends with a question, and the answer that is expected."""

    kind: str
    messages: tuple[Message, ...]
    answer: str


class Guide:
    """The model with its tokenizer, as transformers runs them."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def answer(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """Greedy answers to several conversations at once."""
        prompts = [
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
            for messages in conversations
        ]
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=128,
            )
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts


def ask(*texts: str) -> tuple[Message, ...]:
    """Messages of user, assistant, user, ... with these texts."""
    roles = ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))


def questions(manual: Manual) -> list[Question]:
    """Headings (trained on), held-out phrasings, held-out follow-ups, and foreign subjects."""
    known = [
        Question(kind="heading", messages=ask(e.question), answer=e.answer) for e in manual.entries
    ]
    held_out = [
        Question(kind="held_out", messages=ask(e.held_out), answer=e.answer) for e in manual.entries
    ]
    follow_ups = [
        Question(
            kind="follow_up",
            messages=ask(question, manual.entry(question).answer, follow_up.held_out),
            answer=answer,
        )
        for follow_up in manual.follow_ups
        for question, answer in follow_up.answers.items()
    ]
    refusal = manual.entry(REFUSAL).answer
    outside = [Question(kind="outside", messages=ask(text), answer=refusal) for text in HELD_OUT]
    return [*known, *held_out, *follow_ups, *outside]


def evaluate(guide: Guide, asked: Sequence[Question], batch_size: int = 32) -> dict[str, float]:
    """The share of exact answers of each kind; prints what was answered otherwise."""
    right: dict[str, list[bool]] = {}
    for first in range(0, len(asked), batch_size):
        batch = asked[first : first + batch_size]
        answers = guide.answer([question.messages for question in batch])
        for question, answer in zip(batch, answers, strict=True):
            right.setdefault(question.kind, []).append(answer == question.answer)
            if answer != question.answer:
                text = question.messages[-1]["content"]
                sys.stdout.write(f"{question.kind}: {text}\n    {answer}\n")
    return {kind: round(sum(of) / len(of), 4) for kind, of in right.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m llmc.guide.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path(), help="folder of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args(arguments)
    guide = Guide(given.model, getattr(torch, given.dtype))
    shares = evaluate(guide, questions(load_manual()))
    sys.stdout.write(json.dumps({"dtype": given.dtype, "exact": shares}) + "\n")


if __name__ == "__main__":
    main()
