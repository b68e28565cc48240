"""Tiny random checkpoints of many model families, for tests that compare with transformers.

Families are named here and nowhere in the package: the engine must not know them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCAB = 96
WINDOW = 8
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_WINDOWED = {**_BASE, "head_dim": 8, "sliding_window": WINDOW}
_EXPERTS = {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": lambda **k: tf.LlamaConfig(**{**_BASE, **k}),
    "qwen2": lambda **k: tf.Qwen2Config(**{**_BASE, **k}),
    "qwen3": lambda **k: tf.Qwen3Config(**{**_BASE, "head_dim": 8, **k}),
    "mistral": lambda **k: tf.MistralConfig(**{**_BASE, "sliding_window": WINDOW, **k}),
    "gemma2": lambda **k: tf.Gemma2Config(**{**_WINDOWED, "attn_logit_softcapping": 5.0, **k}),
    "gemma3": lambda **k: tf.Gemma3TextConfig(**{**_WINDOWED, "tie_word_embeddings": False, **k}),
    "phi3": lambda **k: tf.Phi3Config(
        **{**_BASE, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **k}
    ),
    "gpt2": lambda **k: tf.GPT2Config(
        **{
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": None,
            "eos_token_id": None,
            **k,
        }
    ),
    "gpt_neox": lambda **k: tf.GPTNeoXConfig(
        **{**_BASE, "num_key_value_heads": None, "rotary_pct": 0.5, **k}
    ),
    "olmo2": lambda **k: tf.Olmo2Config(**{**_BASE, "eos_token_id": None, **k}),
    "gpt_oss": lambda **k: tf.GptOssConfig(**{**_WINDOWED, **_EXPERTS, **k}),
    "mixtral": lambda **k: tf.MixtralConfig(**{**_EXPERTS, **k}),
}


def make_config(group: str, **changes: Any) -> Any:
    """A config with a few thousand parameters and no end token, so greedy decoding continues."""
    config = FAMILIES[group](**changes)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return config


def save_checkpoint(group: str, path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Random weights large enough that attention is far from uniform."""
    config = make_config(group, **changes)
    dtype = changes.get("dtype", torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # attention sinks and the like keep transformers' initial values
        model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(0.15 * noise)
            else:  # norms, biases, sinks: not 0 or 1, which could hide a bug
                parameter.add_(0.1 * noise)
    model.save_pretrained(path)
    return path


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same checkpoint in transformers, with eager attention."""
    model: nn.Module = tf.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """transformers' greedy tokens, their log-probabilities, and their lead over the next best."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


@cache
def prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Token ids by a fixed rule; no two prompts start alike."""
    return tuple(
        tuple((i * 7 + j * 3 + i * j) % (VOCAB - 6) + 1 for j in range(length))
        for i, length in enumerate(lengths)
    )


def continue_greedily(
    model: Any, prompt: tuple[int, ...], num_tokens: int, *, use_cache: bool = True
) -> Continuation:
    """transformers' own `generate`, one prompt at a time so that nothing is padded."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=use_cache,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(out.logits).float()[:, 0]
    tokens = out.sequences[0, len(prompt) :]
    top = logits.topk(2).values
    return Continuation(
        prompt=prompt,
        tokens=tuple(tokens.tolist()),
        logprobs=tuple(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()),
        margins=tuple((top[:, 0] - top[:, 1]).tolist()),
    )


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, V] float32 of one sequence."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0].float()
