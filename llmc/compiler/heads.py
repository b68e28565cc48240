"""What a captured model computes of each token: logits, its last hidden state, or a classifier's.

lm:     the model as it is                            -> logits of the next token [1, T, V]
hidden: the model without its head, then Dense layers -> [1, T, N]
score:  a classifier's model and its `score` linear   -> [1, T, labels]
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from llmc.errors import CheckpointError
from llmc.kernels.place_rows import place_rows
from llmc.pooling import DENSE, Head

# How transformers' text models are handed rows for their first layers: the tokens that they are
# for, the rows of each layer, and the method that adds some.
LAYER_MASK, LAYER_ROWS = "visual_pos_masks", "deepstack_visual_embeds"
ADD_ROWS = "_deepstack_process"


def make_module(config: Any, head: Head, **options: Any) -> nn.Module:
    """transformers' module of a config, with the Dense layers of `head` as further children.

    Raises CheckpointError for a classifier of another form; else what transformers raises.
    """
    from transformers import AutoModelForSequenceClassification

    maker: Any = _generator(config)
    if head.kind == "score":
        maker = AutoModelForSequenceClassification
    module: nn.Module = maker.from_config(config, **options)
    if head.kind == "score" and not isinstance(getattr(module, "score", None), nn.Linear):
        raise CheckpointError(
            f"{type(module).__name__} has no linear `score` over its decoder's hidden states, the "
            "one form of classifiers that llmc serves"
        )
    for i, dense in enumerate(head.dense):
        layer = nn.Linear(dense.inputs, dense.outputs, dense.bias, dtype=options.get("dtype"))
        module.add_module(DENSE.format(i), layer)
    if head.image_levels:
        mark_embeddings(module, head.image_levels)
    return module


def _generator(config: Any) -> Any:
    """transformers' maker of a model that writes text. Many that read images too have no class
    for text alone: theirs for images, which is given none, computes the same."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def mark_embeddings(module: Any, levels: int) -> None:
    """Let the rows of images be put where the model's embedding leaves those of its tokens; and
    with further `levels` where its text model adds some behind its first layers."""
    embedding = module.get_input_embeddings()
    embed = embedding.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return _marked(embed(*args, **kwargs), 0)

    embedding.forward = forward
    if levels > 1:
        _mark_layers(module.base_model.get_decoder(), levels)


def _mark_layers(decoder: Any, levels: int) -> None:
    """Text models that are handed rows for their first layers add them to the tokens of a mask.
    Here they are given for all tokens, zeros where there are none, and added to all."""
    run = decoder.forward

    def forward(*args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        none = torch.zeros_like(inputs_embeds)
        added = {
            LAYER_MASK: inputs_embeds,  # read by what is replaced below, and by nothing else
            LAYER_ROWS: [_marked(none, level) for level in range(1, levels)],
        }
        return run(*args, inputs_embeds=inputs_embeds, **kwargs, **added)

    def add(hidden_states: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return hidden_states + rows

    decoder.forward = forward
    setattr(decoder, ADD_ROWS, add)


def _marked(values: Tensor, level: int) -> Tensor:
    marked: Tensor = place_rows.overload(values, None, None, level)
    return marked


class HeadOutput(nn.Module):
    """The forward that is captured: ids and positions in, the head's output out, nothing cached."""

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        self.model = model
        self.head = head
        inner: Any = model if head.kind == "lm" else model.base_model
        self.inner = inner
        self.takes_positions = "position_ids" in inspect.signature(inner.forward).parameters

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        given = {"position_ids": position_ids} if self.takes_positions else {}
        out = self.inner(input_ids=input_ids, use_cache=False, **given)
        if self.head.kind == "lm":
            logits: Tensor = out.logits
            return logits
        hidden: Tensor = out.last_hidden_state
        if self.head.kind == "score":
            return self.model.score(hidden)  # type: ignore[operator, no-any-return]
        for i, dense in enumerate(self.head.dense):
            hidden = getattr(self.model, DENSE.format(i))(hidden)
            if dense.activation == "tanh":
                hidden = torch.tanh(hidden)
        return hidden
