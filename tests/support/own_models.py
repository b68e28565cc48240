"""Small models with code of their own: serves them, and compares them with that code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from llmc import LLM, SamplingParams
from llmc.lora_request import LoRARequest

VOCAB, WIDTH, CONTEXT = 64, 32, 64
PROMPTS = ([3, 9, 4, 33, 12, 7, 3], [5], [3, 3, 8, 60, 1, 22, 14, 2, 9])


class SmallConfig(tf.PretrainedConfig):
    vocab_size: int = VOCAB
    hidden_size: int = WIDTH
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = CONTEXT


class SmallModel(tf.PreTrainedModel):
    """Learned positions, layers that get the states and the positions, and a head."""

    def __init__(self, config: SmallConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__(config)
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Buffers are left as their constructors make them, as in code from before meta builds."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return CausalLMOutput(logits=self.head(x))


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
