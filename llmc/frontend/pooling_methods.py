"""The methods of `LLM` for models that return vectors: embed, encode, classify, score."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from llmc.errors import InvalidRequestError
from llmc.frontend.arguments import as_list
from llmc.frontend.inputs import Input, InputProcessor, Prompt
from llmc.frontend.outputs import ActiveRequest
from llmc.frontend.pooling import Scoring, check_params, classification, pooled
from llmc.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from llmc.pooling import PoolingParams, Task, embedding, values_of

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]


class PoolingMethods:
    """Pooling methods of `LLM`.

    A prompt that can't be served gets an output whose `error` says why; the others are served.
    InvalidRequestError is raised if none can be served, or if the model does not support the task.
    """

    _inputs: InputProcessor

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding of each prompt, `.outputs.embedding`, pooled and normalized as intended by
        the model's authors.

        Prompts are as in `generate`; instructions or prefixes that a model was trained with must be
        added by the caller. `dimensions`: only the first that many values, for models trained for
        that. `truncate_prompt_tokens`: maximum number of tokens of a prompt, beyond which its end
        is cut off; -1: the model's context. Without it, a prompt that is too long is an error.
        """
        params = _params(pooling_params, dimensions, truncate_prompt_tokens)
        info = self._inputs.need_pooling("embed")
        check_params(params, info)

        def made(vector: bytes) -> EmbeddingOutput:
            return EmbeddingOutput(embedding=list(embedding(values_of(vector), info, params)))

        return self._pooled(prompts, params, use_tqdm, made)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: Task | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The vector of each prompt, `.outputs.data`, or a list of its tokens' vectors if the model
        is served for those.

        With a `pooling_task`, which must be the model's, vectors are normalized or probabilities,
        unless `use_activation` is False; without one they are raw, unless it is True.
        """
        params = _params(pooling_params, None, truncate_prompt_tokens)
        info = self._inputs.need_pooling(*(() if pooling_task is None else (pooling_task,)))
        check_params(params, info)

        def made(vector: bytes) -> PoolingOutput:
            rows = [list(row) for row in pooled(vector, info, params, pooling_task)]
            return PoolingOutput(data=rows if info.of_tokens else rows[0])

        return self._pooled(prompts, params, use_tqdm, made)

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Probabilities of a classifier's labels for each prompt, `.outputs.probs`."""
        params = _params(pooling_params, None, truncate_prompt_tokens)
        info = self._inputs.need_pooling("classify")
        check_params(params, info)

        def made(vector: bytes) -> ClassificationOutput:
            return classification(vector, info, params)

        return self._pooled(prompts, params, use_tqdm, made)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well texts match, `.outputs.score`: one against many, or pairwise.

        A classifier with one label reads both texts of a pair; with other models the score is the
        cosine similarity of their embeddings. A pair that can't be served raises
        InvalidRequestError.
        """
        params = _params(pooling_params, None, truncate_prompt_tokens)
        left, right = ([t] if isinstance(t, str) else list(t) for t in (text_1, text_2))
        scoring = Scoring(self._inputs, left, right, params)
        jobs = [functools.partial(_given, source) for source in scoring.sources]
        requests = []
        for found in self._vectors(jobs, use_tqdm):
            if isinstance(found, InvalidRequestError):
                raise found
            if found.error is not None:
                raise InvalidRequestError(found.error)
            requests.append(found)
        scores = scoring.scores([request.vector for request in requests])
        return [
            PoolingRequestOutput(
                request_id=requests[0].request_id if len(requests) == 1 else str(i),
                prompt_token_ids=[],
                outputs=ScoringOutput(score=score),
            )
            for i, score in enumerate(scores)
        ]

    def _pooled(
        self,
        prompts: Prompts,
        params: PoolingParams,
        progress: bool,
        made: Callable[[bytes], T],
    ) -> list[PoolingRequestOutput[T]]:
        cut = params.truncate_prompt_tokens
        jobs = [
            functools.partial(self._inputs.pooled, prompt, truncate=cut)
            for prompt in as_list(prompts)
        ]
        return [_output(i, found, made) for i, found in enumerate(self._vectors(jobs, progress))]

    @abstractmethod
    def _vectors(
        self, prepare: Sequence[Callable[[], Input]], progress: bool
    ) -> Sequence[ActiveRequest | InvalidRequestError]:
        """Run these requests to completion."""


def _given(source: Input) -> Input:
    return source


def _output(
    index: int, found: ActiveRequest | InvalidRequestError, made: Callable[[bytes], T]
) -> PoolingRequestOutput[T]:
    if isinstance(found, InvalidRequestError):
        return PoolingRequestOutput(
            request_id=str(index), prompt_token_ids=[], outputs=None, error=str(found)
        )
    return PoolingRequestOutput(
        request_id=found.request_id,
        prompt_token_ids=found.source.prompt_token_ids,
        outputs=made(found.vector) if found.error is None else None,
        num_cached_tokens=found.num_cached_tokens,
        error=found.error,
    )


def _params(
    given: PoolingParams | None, dimensions: int | None, truncate: int | None
) -> PoolingParams:
    """The given parameters, or those from the keywords."""
    if given is None:
        return PoolingParams(dimensions=dimensions, truncate_prompt_tokens=truncate)
    if not isinstance(given, PoolingParams):
        raise InvalidRequestError(
            f"pooling_params must be PoolingParams, got {given!r:.80}", param="pooling_params"
        )
    if dimensions is not None or truncate is not None:
        raise InvalidRequestError(
            "give dimensions and truncate_prompt_tokens in pooling_params or as keywords, not both",
            param="pooling_params",
        )
    return given
