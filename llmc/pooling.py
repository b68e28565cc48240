"""Pooling options of models that return vectors, and the postprocessing of one vector.

The step returns one raw vector per request: pooled hidden states, or a classifier's scores. The
postprocessing depends on the request (`dimensions`, raw scores), so it happens here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmc.errors import InvalidRequestError

# What a model is served for. `auto` follows its files. `pooling` and `score`: classification for a
# classifier, embeddings for any other model. `reward`: a classifier's raw scores.
# `token_embed` and `token_classify`: one vector per token.
Task = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
TASKS = ("auto", "generate", "pooling", "score", "reward", *POOLING_TASKS)
# Named as in sentence-transformers: the last token; the first token; the mean over all tokens,
# plain, weighted by position (from 1), or divided by the square root of the count instead of the
# count; the maximum of each channel.
Method = Literal["last", "cls", "mean", "weightedmean", "mean_sqrt_len", "max"]
METHODS: tuple[Method, ...] = ("last", "cls", "mean", "weightedmean", "mean_sqrt_len", "max")
POOLINGS = ("auto", *METHODS)
Activation = Literal["softmax", "sigmoid", "none"]
DENSE = "llmc_dense_{}"  # the module name of a Dense layer
# This bit is set in the token ids of a pair's second text, for models that distinguish the two: it
# travels with the ids, and no vocabulary is that large.
SECOND_TEXT = 1 << 30
DRAFTED = 1 << 30  # the same bit in a draft head's rows marks tokens that it drafted itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A linear layer that sentence-transformers applies after pooling, with its activation."""

    inputs: int
    outputs: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """A drafter for a model of `vocab_size` tokens that reads its hidden states: an EAGLE-3 head
    or, with `is_own_layer`, an extra layer of the model itself, for which the other fields are
    unused (compiler/draft_head.py).

    An EAGLE-3 head reads `num_taps` hidden states of `width` values.
    """

    vocab_size: int
    is_own_layer: bool = False
    num_taps: int = 1
    width: int = 0
    draft_vocab_size: int = 0  # tokens that it can draft
    has_id_map: bool = False  # these are a subset of the model's, mapped to its ids by a table
    has_fc_bias: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False  # the residual of its attention is normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The part of a model to capture (compiler/heads.py).

    `encoder`: attention is bidirectional. `token_types`: token ids carry which text of a pair
    they belong to (`SECOND_TEXT`).
    `image_levels`: 1 if image rows can replace token embeddings; each further level adds image
    rows to the hidden states after one more of the first layers. `position_axes`: positions per
    token; 0: one, its index in the sequence.
    `draft_head`: the draft head to capture instead of a model.
    """

    kind: Literal["lm", "hidden", "score", "token_score"] = "lm"
    dense: tuple[Dense, ...] = ()
    encoder: bool = False
    token_types: bool = False
    image_levels: int = 0
    position_axes: int = 0
    draft_head: DraftHead | None = None

    def position_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the position ids of `tokens` tokens in a batch of one."""
        return (self.position_axes, 1, tokens) if self.position_axes else (1, tokens)


LM = Head()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Pooling of a running model. `size`: length of its vectors; for a classifier, its labels."""

    task: Task
    method: Method
    size: int
    normalize: bool = False  # embeddings: scale to length 1
    activation: Activation = "none"  # classifiers: applied to scores
    labels: tuple[str, ...] = ()
    token_types: bool = False  # the model gets which text of a pair each token belongs to

    @property
    def of_tokens(self) -> bool:
        """Whether there is one vector per token; they are then concatenated."""
        return self.task in TOKEN_TASKS

    @property
    def classifies(self) -> bool:
        return self.task in ("classify", "token_classify")

    @property
    def scores_pairs(self) -> bool:
        """Whether text pairs can be scored: by their embeddings, or with a single label."""
        is_single_label = self.task == "classify" and self.size == 1
        return is_single_label or self.task in ("embed", "token_embed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Postprocessing of the vectors of one call, with vLLM's names.

    `dimensions`: keep only the first values of embeddings, for models trained for that
    (matryoshka). `use_activation`: whether to normalize embeddings and turn scores into
    probabilities; None: the model's own setting. `truncate_prompt_tokens`: see `LLM.embed`.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise InvalidRequestError(
                f"use_activation must be True, False or None, got {self.use_activation!r}",
                param="use_activation",
            )


def values_of(vector: bytes) -> array[float]:
    """Decode raw values: float32 in native byte order."""
    return array("f", vector)


def is_normalized(info: PoolingInfo, params: PoolingParams) -> bool:
    """Whether embeddings are scaled to length 1: as the call asks, otherwise as the model does."""
    return info.normalize if params.use_activation is None else params.use_activation


def embedding(raw: Sequence[float], info: PoolingInfo, params: PoolingParams) -> array[float]:
    """Turn a raw vector into an embedding: keep `dimensions` values, then normalize to length 1."""
    values = raw[: params.dimensions]
    if is_normalized(info, params):
        length = math.sqrt(math.fsum(v * v for v in values)) or 1.0
        return array("f", [v / length for v in values])
    return array("f", values)


def probabilities(raw: Sequence[float], info: PoolingInfo, params: PoolingParams) -> list[float]:
    """Apply the classifier's activation to its scores, one per label."""
    if params.use_activation is False:
        return list(raw)
    activation = info.activation
    if params.use_activation and activation == "none":
        activation = "sigmoid" if len(raw) == 1 else "softmax"
    return _activated(raw, activation)


def check_dimensions(dimensions: int | None, info: PoolingInfo) -> None:
    """Raise InvalidRequestError unless embeddings can be cut to `dimensions` values."""
    if dimensions is not None and not 1 <= dimensions <= info.size:
        raise InvalidRequestError(
            f"dimensions must be from 1 to {info.size}, the size of this model's embeddings; "
            f"got {dimensions}",
            param="dimensions",
        )


def _activated(raw: Sequence[float], activation: Activation) -> list[float]:
    if activation == "sigmoid":
        return [_sigmoid(v) for v in raw]
    if activation == "softmax":
        top = max(raw)
        weights = [math.exp(v - top) for v in raw]
        total = math.fsum(weights)
        return [w / total for w in weights]
    return list(raw)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    weight = math.exp(value)
    return weight / (1 + weight)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine similarity of two vectors; 0 if one of them is 0."""
    lengths = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
