"""Vectors of requests -> embeddings, probabilities and scores, for `LLM` and the server alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Input, InputProcessor
from llmc.outputs import ClassificationOutput
from llmc.pooling import (
    PoolingInfo,
    PoolingParams,
    Task,
    check_dimensions,
    cosine,
    embedding,
    is_normalized,
    probabilities,
    values_of,
)
from llmc.text.tokenizer import check_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_params(params: PoolingParams, info: PoolingInfo) -> None:
    """Raise InvalidRequestError for parameters that this model does not support."""
    if params.dimensions is not None and info.classifies:
        raise InvalidRequestError(
            "dimensions are for embeddings, but this model is a classifier", param="dimensions"
        )
    check_dimensions(params.dimensions, info)


def classification(vector: bytes, info: PoolingInfo, params: PoolingParams) -> ClassificationOutput:
    raw = values_of(vector)
    best = max(range(len(raw)), key=raw.__getitem__)
    return ClassificationOutput(probs=probabilities(raw, info, params), label=info.labels[best])


def pooled(
    vector: bytes, info: PoolingInfo, params: PoolingParams, task: Task | None
) -> list[array[float]]:
    """The vector of a text, or of each of its tokens. Vectors are raw, unless `use_activation` is
    set or, if that is None, a `task` is given; then they are embeddings or probabilities."""
    raw = values_of(vector)
    rows = [raw[i : i + info.size] for i in range(0, len(raw), info.size)]
    if not (task if params.use_activation is None else params.use_activation):
        return [row[: params.dimensions] for row in rows]
    if info.classifies:
        return [array("f", probabilities(row, info, params)) for row in rows]
    return [embedding(row, info, params) for row in rows]


class Scoring:
    """Scores of pairs of texts. A classifier with one label reads both texts, joined by
    transformers' tokenizer. Embeddings are compared by cosine similarity, and embeddings of tokens
    by late interaction (`max_sim`), with the first text of a pair as the query.

    `sources` are the inputs for the engine; `scores` computes the scores from their vectors.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        left: Sequence[str],
        right: Sequence[str],
        params: PoolingParams,
    ) -> None:
        """Score one text against many, many against one, or pairs with equal indices.

        Raises InvalidRequestError.
        """
        self._info = info = inputs.need_pooling("embed", "classify", "token_embed")
        self._params = params
        if not info.scores_pairs:
            raise InvalidRequestError(
                f"this classifier has {info.size} labels, but scoring needs a classifier with one "
                "label, or an embedding model; use /classify or LLM.classify to get its labels",
                param="model",
                code="wrong_task",
            )
        check_params(params, info)
        most = max(len(left), len(right))
        if not left or not right or not {len(left), len(right)} <= {1, most}:
            raise InvalidRequestError(
                f"{len(left)} texts can't be scored against {len(right)}: give one for all, or the "
                "same number on both sides",
                param="text_1",
            )
        for text in (*left, *right):
            check_text(text, "text_2")
        self._pairs = [(i % len(left), i % len(right)) for i in range(most)]
        cut = params.truncate_prompt_tokens
        self.sources: list[Input]
        if info.task == "classify":
            self.sources = [
                inputs.pooled(left[i], pair=right[j], truncate=cut) for i, j in self._pairs
            ]
        else:
            self.sources = [inputs.pooled(text, truncate=cut) for text in (*left, *right)]
        self._num_left = len(left)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """One score per pair; `vectors` are those of `sources`."""
        info, params = self._info, self._params
        if info.task == "classify":
            return [probabilities(values_of(v), info, params)[0] for v in vectors]
        if info.of_tokens:
            rows = [_token_rows(v, info, params) for v in vectors]
            return [max_sim(rows[i], rows[self._num_left + j]) for i, j in self._pairs]
        found = [embedding(values_of(v), info, params) for v in vectors]
        return [cosine(found[i], found[self._num_left + j]) for i, j in self._pairs]


def max_sim(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Late interaction (ColBERT, https://arxiv.org/abs/2004.12832): each token of the query [Q, D]
    counts with the most similar token of the document [N, D]; the products are summed.
    """
    return float((query @ document.T).max(axis=1).sum())


def _token_rows(vector: bytes, info: PoolingInfo, params: PoolingParams) -> NDArray[np.float32]:
    """[tokens, size]"""
    import numpy as np

    rows: NDArray[np.float32]
    rows = np.frombuffer(vector, np.float32).reshape(-1, info.size)[:, : params.dimensions]
    if is_normalized(info, params):
        lengths = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
        lengths[lengths == 0] = 1
        rows = rows / lengths
    return rows
