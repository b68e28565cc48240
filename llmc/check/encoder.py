"""`check_encoder`: compares vectors of a small random copy of an encoder with transformers'.

    small config -> random checkpoint -> LLM.encode, and the model as transformers runs it

Sequences are served together, to detect attention from one to another. Their lengths are on both
sides of the model's windows, which shrinking has made small.
"""

from __future__ import annotations

import dataclasses
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmc.check.reference import encoder_maker, load_encoder, save_random
from llmc.config import EngineConfig
from llmc.errors import LlmcError
from llmc.llm import LLM
from llmc.pooling import Task
from llmc.startup.architecture_certificate import ArchitectureCertificate

_LENGTHS = (5, 1, 37, 20, 90)
LIMIT = 1e-3  # relative, in float32
# The task of an encoder with a head of this kind.
TASKS: dict[str, Task] = {"hidden": "embed", "score": "classify", "token_score": "token_classify"}
_FIRST_ID = 5  # lower ids are often padding, whose positions some models number differently


def check_encoder(config: EngineConfig, hf_config: Any, task: Task) -> float:
    """The largest relative error of a sequence's vector: the mean of its hidden states, its scores,
    or the scores of its tokens.

    `hf_config` is small enough for random weights. Raises whatever its class or a start raises.
    """
    with tempfile.TemporaryDirectory(prefix="llmc-check-") as folder:
        path = Path(folder)
        save_random(hf_config, path, encoder_maker(hf_config, task))
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        fields |= {
            "model": folder,
            "tokenizer": None,
            "chat_template": None,
            "revision": None,
            "task": task,
            "pooling": "mean" if task == "embed" else "auto",
            "normalize": None,
            "dtype": "float32",
            "load_format": "auto",
            "quantization": None,
            "max_model_len": None,
            "opt_level": 0,
        }
        with LLM(**fields) as llm:
            most, vocab = llm.info.max_model_len, llm.info.vocab_size
            texts = _texts([min(n, most) for n in _LENGTHS], vocab)
            outputs = llm.encode(texts, use_tqdm=False)
        found = [torch.tensor(o.outputs.data) for o in outputs if o.outputs is not None]
        if len(found) != len(texts):
            raise LlmcError(next(o.error for o in outputs if o.error) or "a sequence has no vector")
        want = _reference(path, hf_config, texts, task)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True))


def describe(error: float, notes: tuple[str, ...]) -> ArchitectureCertificate:
    is_right = error <= LIMIT
    return ArchitectureCertificate(
        status="certified" if is_right else "different",
        reason="" if is_right else f"its vectors differ by {error:.1e}",
        notes=notes,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _texts(lengths: list[int], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    first = min(_FIRST_ID, vocab - 1)
    return [torch.randint(first, vocab, (n,), generator=generator).tolist() for n in lengths]


def _reference(path: Path, hf_config: Any, texts: list[list[int]], task: Task) -> list[Tensor]:
    """transformers' vectors, one sequence at a time, with its own positions and masks."""
    module = load_encoder(path, hf_config, task)
    found = []
    for ids in texts:
        with torch.inference_mode():
            given = torch.tensor([ids])
            if task != "embed":
                found.append(module(input_ids=given).logits[0])
            else:
                found.append(module.base_model(input_ids=given).last_hidden_state[0].mean(0))
    return found
