"""What a captured model computes of each token: logits, its last hidden state, or a classifier's.

lm:          the model as it is                            -> logits of the next token [1, T, V]
hidden:      the model without its head, then Dense layers -> [1, T, N]
score:       a classifier's model and its head             -> [1, T, labels]
token_score: a classifier of tokens as it is               -> [1, T, labels]

A draft head (draft_head.py) is of the first kind. Where the others pool their tokens,
`pool_tokens` marks it. All that follows is computed of every token, as if each were the only one of
a text, so that the one that is wanted has its text's.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from llmc.compiler.draft_head import make_head
from llmc.errors import CheckpointError
from llmc.kernels.place_rows import place_rows
from llmc.kernels.pool_tokens import pool_tokens
from llmc.pooling import DENSE, SECOND_TEXT, Head

# How transformers' text models are handed rows for their first layers: the tokens that they are
# for, the rows of each layer, and the method that adds some.
LAYER_MASK, LAYER_ROWS = "visual_pos_masks", "deepstack_visual_embeds"
ADD_ROWS = "_deepstack_process"
# What models whose positions begin behind that of padding number their tokens with: a function, or
# a method of their embeddings.
_COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"


def make_module(config: Any, head: Head, **options: Any) -> nn.Module:
    """transformers' module of a config, with the Dense layers of `head` as further children.

    Raises CheckpointError for a classifier of another form; else what transformers raises.
    """
    if head.draft is not None:
        return make_head(_generator(config), config, head.draft, **options)
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    maker: Any = _generator(config)
    if head.kind == "score":
        maker = AutoModelForSequenceClassification
    elif head.kind == "token_score":
        maker = AutoModelForTokenClassification
    elif head.encoder:
        maker = without_head(config)
    module: nn.Module = maker.from_config(config, **options)
    if _reads_tokens(module, head):
        _classify_tokens(module)
    elif head.kind == "score" and not _has_score(module):
        raise CheckpointError(
            f"{type(module).__name__} has no linear `score` over its decoder's hidden states, the "
            "one form of classifiers of decoders that llmc serves"
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
    """Whether it is an encoder's classifier, with a head of its own."""
    return head.kind == "score" and head.encoder and not _has_score(module)


def is_masked_lm(config: Any) -> bool:
    """Whether transformers knows the model as one that fills in words, and not as a decoder."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    is_listed = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return is_listed and not getattr(config, "is_decoder", False)


def has_no_head(config: Any) -> bool:
    """Whether transformers has the model, and knows no class of it that writes text."""
    from transformers import MODEL_MAPPING

    kind = type(config)
    writes = any(kind in maker._model_mapping for maker in _generators())
    has_words = getattr(config.get_text_config(), "vocab_size", None) is not None
    return kind in MODEL_MAPPING and has_words and not writes


def without_head(config: Any) -> Any:
    """transformers' maker of an encoder's model: of a decoder that was made one, the decoder's."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel

    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked_lm(config)
    return _generator(config) if is_decoder else AutoModel


def first_position(config: Any) -> int:
    """The position of a text's first token: models that give padding tokens a position of their own
    count from the one behind it."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return 0
    module = sys.modules[MODEL_MAPPING[type(config)].__module__]
    made = [module, *(one for one in vars(module).values() if isinstance(one, type))]
    counts = any(_COUNTS_FROM_PADDING in vars(one) for one in made)
    padding = getattr(config, "pad_token_id", None)
    return padding + 1 if counts and isinstance(padding, int) else 0


def _classify_tokens(module: Any) -> None:
    """Let an encoder's classifier read every token as a text of its own: [T, 1, N], behind the
    encoder. Whether it reads the first token or the mean of all, that is the token.

    What a model's own pooler makes of the first token is a part of its classifier.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    base = module.base_model
    pooler = getattr(base, "pooler", None)
    # A linear is handed the first token; what hands it that gets every token's.
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
    """Whether an encoder's classifier pools its scores, instead of what they are made of."""
    return getattr(module.config, "classifier_pooling", None) == "late"


def _generator(config: Any) -> Any:
    """transformers' maker of a model that writes text. Many that read images or sound too have no
    class for text alone: theirs for these, which is given none, computes the same."""
    makers = _generators()
    return next((maker for maker in makers if type(config) in maker._model_mapping), makers[0])


def _generators() -> list[Any]:
    """transformers' makers of models that write text, that for text alone first. Older versions
    lack one, and have most models that read sound in the last alone."""
    import transformers

    reads = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM")
    makers = (getattr(transformers, f"AutoModelFor{name}", None) for name in reads)
    return [maker for maker in makers if maker is not None]


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
        self.is_whole = head.kind in ("lm", "token_score")
        inner: Any = model if self.is_whole else model.base_model
        self.classifies = _reads_tokens(model, head)
        self.inner = model if self.classifies else inner
        parameters = inspect.signature(self.inner.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_cache = not head.encoder or "use_cache" in parameters
        self.takes_types = head.token_types and "token_type_ids" in parameters
        self.first_position = first_position(model.config) if head.encoder else 0

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        given: dict[str, Any] = {"use_cache": False} if self.takes_cache else {}
        if self.takes_positions:
            given["position_ids"] = position_ids + self.first_position
        if self.head.token_types:
            types = (input_ids >= SECOND_TEXT).long()
            input_ids = input_ids - types * SECOND_TEXT
            if self.takes_types:
                given["token_type_ids"] = types
        out = self.inner(input_ids=input_ids, **given)
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
