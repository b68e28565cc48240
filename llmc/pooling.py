"""Pooling: what a model that returns vectors does with them. Plain data, and the arithmetic on one.

The step gives one raw vector a request: pooled hidden states, or a classifier's scores. What is
done with it depends on the request (`dimensions`, raw scores), so it is done here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmc.errors import InvalidRequestError

# What a model is served for. `auto`: what its files say. `pooling` and `score`: a classifier as
# one, any other model for embeddings. `reward`: a classifier whose scores stay as they are.
# `token_embed` and `token_classify`: a vector of each token.
Task = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
TASKS = ("auto", "generate", "pooling", "score", "reward", *POOLING_TASKS)
# As sentence-transformers names them: of the last token, of the first one, or a mean of all tokens:
# plain, weighted by their places from 1, or with the sum divided by the root of their number; or
# the greatest value of each channel.
Method = Literal["last", "cls", "mean", "weightedmean", "mean_sqrt_len", "max"]
METHODS: tuple[Method, ...] = ("last", "cls", "mean", "weightedmean", "mean_sqrt_len", "max")
POOLINGS = ("auto", *METHODS)
Activation = Literal["softmax", "sigmoid", "none"]
DENSE = "llmc_dense_{}"  # the name of a Dense layer in a module
# The ids of tokens of the second text of a pair have this bit, for models that tell the two apart:
# it goes where the ids go, and no vocabulary reaches it.
SECOND_TEXT = 1 << 30
DRAFTED = 1 << 30  # and, in a draft head's rows, those of tokens that it drew itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A linear that sentence-transformers puts behind the pooling, and what follows it."""

    inputs: int
    outputs: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What drafts for a model of `vocab_size` tokens from its hidden states: a head in the form of
    EAGLE-3 or, with `is_own_layer`, one more layer of the model itself, of which the rest says
    nothing (compiler/draft_head.py).

    An EAGLE-3 head reads `num_taps` hidden states of `width` values.
    """

    vocab_size: int
    is_own_layer: bool = False
    num_taps: int = 1
    width: int = 0
    draft_vocab_size: int = 0  # tokens that it may draw
    has_id_map: bool = False  # they are some of the model's, in an order of their own
    has_fc_bias: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False  # what is added to its attention's output is normed


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is captured of a model (compiler/heads.py).

    `encoder`: its tokens see those after them too. `token_types`: its token ids say which text of
    a pair each is of (`of_second_text`).
    `image_levels`: rows of images may stand for embeddings of its tokens (1), and are added to the
    hidden states behind so many first layers (each further one). `position_axes`: how many
    positions each token then has; 0: one, its place in the text.
    `draft`: it is no model but a head that drafts for one.
    """

    kind: Literal["lm", "hidden", "score", "token_score"] = "lm"
    dense: tuple[Dense, ...] = ()
    encoder: bool = False
    token_types: bool = False
    image_levels: int = 0
    position_axes: int = 0
    draft: DraftHead | None = None

    def position_shape(self, tokens: int) -> tuple[int, ...]:
        """Of the positions of so many tokens, in a batch of one."""
        return (self.position_axes, 1, tokens) if self.position_axes else (1, tokens)


LM = Head()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Of a model that runs. `size`: values of its vectors; for a classifier, one a label."""

    task: Task
    method: Method
    size: int
    normalize: bool = False  # embeddings: to length 1
    activation: Activation = "none"  # classifiers: of scores
    labels: tuple[str, ...] = ()
    token_types: bool = False  # it is told which text of a pair a token is of

    @property
    def of_tokens(self) -> bool:
        """Whether each token of a text has a vector: then they are one behind the other."""
        return self.task in TOKEN_TASKS

    @property
    def classifies(self) -> bool:
        return self.task in ("classify", "token_classify")

    @property
    def scores_pairs(self) -> bool:
        """Whether texts can be compared: by their embeddings, or as one label of both."""
        return self.task == "embed" or (self.task == "classify" and self.size == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What is done with the vectors of one call, named as vLLM's users know it.

    `dimensions`: the first values of embeddings alone, for models trained for that (matryoshka).
    `use_activation`: whether embeddings are normalized and scores made probabilities; None: as the
    model's authors do it. `truncate_prompt_tokens`: see `LLM.embed`.
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
    """The raw values, float32 in this machine's byte order."""
    return array("f", vector)


def embedding(raw: Sequence[float], info: PoolingInfo, params: PoolingParams) -> array[float]:
    """The embedding of a raw vector: its first `dimensions` values, then length 1."""
    values = raw[: params.dimensions]
    if info.normalize if params.use_activation is None else params.use_activation:
        length = math.sqrt(math.fsum(v * v for v in values)) or 1.0
        return array("f", [v / length for v in values])
    return array("f", values)


def probabilities(raw: Sequence[float], info: PoolingInfo, params: PoolingParams) -> list[float]:
    """A classifier's scores, one a label, by its activation."""
    if params.use_activation is False:
        return list(raw)
    activation = info.activation
    if params.use_activation and activation == "none":
        activation = "sigmoid" if len(raw) == 1 else "softmax"
    return _activated(raw, activation)


def check_dimensions(dimensions: int | None, info: PoolingInfo) -> None:
    """Raises InvalidRequestError unless the embedding can be cut to so many values."""
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
    """The cosine of the angle between two vectors; 0 where one of them is 0."""
    lengths = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
