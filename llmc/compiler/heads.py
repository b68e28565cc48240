"""What a captured model computes for each token: logits, the last hidden state, or class scores.

lm:          the model as it is                            -> logits of the next token [1, T, V]
hidden:      the model without its head, then Dense layers -> [1, T, N]
score:       a classifier's model and its head             -> [1, T, labels]
token_score: a classifier of tokens as it is               -> [1, T, labels]

A draft head (draft_head.py) is of the first kind. In the other kinds, `pool_tokens` marks where
tokens are pooled. Everything after it is computed for every token, as if it were the only one of a
sequence, so the pooled token gets the result of its sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmc.compiler.draft_head import make_head
from llmc.errors import CheckpointError
from llmc.kernels.place_rows import place_rows
from llmc.kernels.pool_tokens import pool_tokens
from llmc.pooling import DENSE, SECOND_TEXT, Head

# How transformers' text models receive rows for their first layers: the mask of their tokens, the
# rows of each layer, and the method that adds them.
LAYER_MASK, LAYER_ROWS = "visual_pos_masks", "deepstack_visual_embeds"
ADD_ROWS = "_deepstack_process"
# Used by models whose positions start after the padding position: a function, or a method of their
# embeddings.
_COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"


def make_module(
    config: Any, head: Head, *, trust_remote_code: bool = False, **options: Any
) -> nn.Module:
    """transformers' module for a config, with the Dense layers of `head` as additional children.

    With `trust_remote_code`, code that the config names is run. Raises CheckpointError for an
    unsupported classifier, and whatever transformers raises.
    """
    if head.draft_head is not None:
        return make_head(_generator(config), config, head.draft_head, **options)
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    maker: Any = _generator(config)
    if head.kind == "score":
        maker = AutoModelForSequenceClassification
    elif head.kind == "token_score":
        maker = AutoModelForTokenClassification
    elif head.encoder:
        maker = without_head(config)
    module: nn.Module = maker.from_config(config, trust_remote_code=trust_remote_code, **options)
    if _reads_tokens(module, head):
        _classify_tokens(module)
    elif head.kind == "score" and not _has_score(module):
        raise CheckpointError(
            f"{type(module).__name__} has no linear `score` over its decoder's hidden states, the "
            "only form of decoder classifiers that llmc supports"
        )
    for i, dense in enumerate(head.dense):
        layer = nn.Linear(dense.inputs, dense.outputs, dense.bias, dtype=options.get("dtype"))
        module.add_module(DENSE.format(i), layer)
    if head.image_levels:
        mark_embeddings(module, head.image_levels)
    return module


def _has_score(module: Any) -> bool:
    """Whether it is a decoder's classifier: a linear over each token's hidden state."""
    return isinstance(getattr(module, "score", None), nn.Linear)


def _reads_tokens(module: Any, head: Head) -> bool:
    """Whether it is an encoder's classifier with its own head."""
    return head.kind == "score" and head.encoder and not _has_score(module)


def is_masked_lm(config: Any) -> bool:
    """Whether the model is a masked language model in transformers, and not a decoder."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    is_listed = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return is_listed and not getattr(config, "is_decoder", False)


def has_no_head(config: Any) -> bool:
    """Whether transformers has the model, but no class of it that generates text."""
    from transformers import MODEL_MAPPING

    kind = type(config)
    writes = any(kind in maker._model_mapping for maker in _generators())
    has_words = getattr(config.get_text_config(), "vocab_size", None) is not None
    return kind in MODEL_MAPPING and has_words and not writes


def without_head(config: Any) -> Any:
    """transformers' auto class for an encoder; for a bidirectional decoder, that of the decoder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel

    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked_lm(config)
    return _generator(config) if is_decoder else AutoModel


def first_position(config: Any) -> int:
    """The position of a sequence's first token: models with a separate position for padding tokens
    count from the one after it."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return 0
    module = sys.modules[MODEL_MAPPING[type(config)].__module__]
    made = [module, *(one for one in vars(module).values() if isinstance(one, type))]
    counts = any(_COUNTS_FROM_PADDING in vars(one) for one in made)
    padding = getattr(config, "pad_token_id", None)
    return padding + 1 if counts and isinstance(padding, int) else 0


def _classify_tokens(module: Any) -> None:
    """Let an encoder's classifier see every token as a sequence of its own, [T, 1, N], after the
    encoder. Both the first token and the mean of all are then that token.

    A model's own pooler of the first token is part of its classifier.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    base = module.base_model
    pooler = getattr(base, "pooler", None)
    # A linear pooler gets the first token only, so its caller is changed instead.
    behind = base.encoder if isinstance(pooler, nn.Linear) else base
    run = behind.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=apart(out.last_hidden_state),
            pooler_output=getattr(out, "pooler_output", None),
        )

    def apart(hidden: Tensor) -> Tensor:
        tokens: Tensor = hidden if pools_last(module) else pool_tokens.overload(hidden)
        return tokens[0][:, None]

    behind.forward = forward
    if pooler is not None and not isinstance(pooler, nn.Linear):
        pool = pooler.forward
        pooler.forward = lambda hidden: pool(apart(hidden))


def pools_last(module: Any) -> bool:
    """Whether an encoder's classifier pools scores instead of hidden states."""
    return getattr(module.config, "classifier_pooling", None) == "late"


def _generator(config: Any) -> Any:
    """transformers' auto class for a generative model. Many multimodal models have no text-only
    class; their multimodal class computes the same if it gets no images or audio."""
    makers = _generators()
    return next((maker for maker in makers if type(config) in maker._model_mapping), makers[0])


def is_captured(module: nn.Module, config: Any) -> bool:
    """Whether `make_module` makes modules of this class for a generative model."""
    return _generator(config)._model_mapping.get(type(config), None) is type(module)


def _generators() -> list[Any]:
    """transformers' auto classes for generative models, the text-only one first. Older versions
    lack one of them, and have most audio models only in the last."""
    import transformers

    reads = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM")
    makers = (getattr(transformers, f"AutoModelFor{name}", None) for name in reads)
    return [maker for maker in makers if maker is not None]


def mark_embeddings(module: Any, levels: int) -> None:
    """Mark where rows of images replace token embeddings and, with more than one of `levels`, where
    the text model adds rows after its first layers."""
    embedding = module.get_input_embeddings()
    embed = embedding.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return _marked(embed(*args, **kwargs), 0)

    embedding.forward = forward
    if levels > 1:
        _mark_layers(module.base_model.get_decoder(), levels)


def _mark_layers(decoder: Any, levels: int) -> None:
    """Let a text model add rows for its first layers to all tokens, with zeros where there are
    none. Its own code adds them to the tokens of a mask."""
    run = decoder.forward

    def forward(*args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        none = torch.zeros_like(inputs_embeds)
        added = {
            LAYER_MASK: inputs_embeds,  # only read by the method replaced below
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


def taken(forward: Callable[..., Any], input_ids: Tensor, **options: Any) -> dict[str, Any]:
    """The arguments of a call with these ids, and with those of the options that the code takes.
    Code of its own may have another name for its tokens."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ids = "input_ids" if takes_any or "input_ids" in parameters else next(iter(parameters))
    known = {name: x for name, x in options.items() if takes_any or name in parameters}
    return {ids: input_ids, **known}


class HeadOutput(nn.Module):
    """The captured forward: takes ids and positions, returns the head's output, caches nothing."""

    def __init__(self, model: nn.Module, head: Head) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.is_whole = head.kind in ("lm", "token_score")
        inner: Any = model if self.is_whole else model.base_model
        self.classifies = _reads_tokens(model, head)
        self.inner = model if self.classifies else inner
        parameters = inspect.signature(self.inner.forward).parameters
        self.ids, *of_cache = taken(self.inner.forward, torch.empty(0), use_cache=False)
        self.takes_positions = "position_ids" in parameters
        self.takes_cache = bool(of_cache) and (not head.encoder or "use_cache" in parameters)
        self.takes_types = head.token_types and "token_type_ids" in parameters
        self.first_position = first_position(model.config) if head.encoder else 0

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        given: dict[str, Any] = {"use_cache": False} if self.takes_cache else {}
        if self.takes_positions:
            first = self.first_position  # a sum with 0 would hide that these are the positions
            given["position_ids"] = position_ids + first if first else position_ids
        if self.head.token_types:
            types = (input_ids >= SECOND_TEXT).long()
            input_ids = input_ids - types * SECOND_TEXT
            if self.takes_types:
                given["token_type_ids"] = types
        out = self.inner(**{self.ids: input_ids}, **given)
        if self.classifies:
            scores: Tensor = out.logits[None]
            return pool_tokens.overload(scores) if pools_last(self.model) else scores
        if self.is_whole:
            logits: Tensor = out.logits
            return logits
        hidden: Tensor = pool_tokens.overload(out.last_hidden_state)
        if self.head.kind == "score":
            return self.model.score(hidden)  # type: ignore[operator, no-any-return]
        for i, dense in enumerate(self.head.dense):
            hidden = getattr(self.model, DENSE.format(i))(hidden)
            if dense.activation == "tanh":
                hidden = torch.tanh(hidden)
        return hidden
