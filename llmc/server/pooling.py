"""/v1/embeddings, /pooling, /classify, /score and /rerank: vectors and scores from pooling models.

body -> texts -> Input (one per vector) -> GenerationResponse -> `made` of the vectors
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.frontend.inputs import Input, Prompt
from llmc.frontend.pooling import check_params, classification, pooled
from llmc.pooling import PoolingParams, embedding, values_of
from llmc.server import answer
from llmc.server.body import read_body, split_inputs
from llmc.server.models import model_name
from llmc.server.pooling_protocol import (
    MAX_INPUTS,
    MAX_TOKEN_VALUES,
    Document,
    EmbeddingBody,
    InputBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from llmc.server.respond import OPENAI, Deltas, GenerationResponse, preparing
from llmc.server.sampling import cache_salt, priority
from llmc.server.turn import renamed_params

Made = Callable[[Stream], Any]  # the response, as JSON


class PooledCall:
    """A call whose requests each end with a vector; it never streams."""

    stream = False
    wire = OPENAI

    def __init__(self, sources: Sequence[Input], made: Made) -> None:
        self.sources = sources
        self._made = made

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        return ()

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        return ()

    def body(self, stream: Stream) -> Any:
        answer.check_not_aborted(stream)
        return self._made(stream)


async def create_embedding(request: Request) -> GenerationResponse:
    """OpenAI's embeddings."""
    body = await read_body(request, EmbeddingBody)
    llm: AsyncLLM = request.app.state.llm
    model, info = model_name(request, body.model), llm.inputs.need_pooling("embed")
    params = params_of(body, body.dimensions)
    check_params(params, info)
    head = answer.AnswerHead("embd", "list", model)

    def made(stream: Stream) -> dict[str, Any]:
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": written(
                    embedding(values_of(one.vector), info, params), body.encoding_format
                ),
            }
            for i, one in enumerate(stream.requests)
        ]
        return head(data=data, usage=usage(stream))

    return await respond(request, body, body.input, made)


async def create_pooling(request: Request) -> GenerationResponse:
    """Vectors of texts or of their tokens. The default `task` is the model's own."""
    body = await read_body(request, PoolingBody)
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    info = llm.inputs.need_pooling(*(() if body.task is None else (body.task,)))
    params = params_of(body, body.dimensions)
    check_params(params, info)
    head = answer.AnswerHead("pool", "list", model)

    def made(stream: Stream) -> dict[str, Any]:
        data = []
        for i, one in enumerate(stream.requests):
            rows = pooled(one.vector, info, params, body.task)
            shown: Any
            if not info.of_tokens:
                shown = written(rows[0], body.encoding_format)
            elif body.encoding_format == "float":
                shown = [list(row) for row in rows]
            else:
                shown = written(array("f", chain.from_iterable(rows)), body.encoding_format)
            data.append({"object": "pooling", "index": i, "data": shown})
        return head(data=data, usage=usage(stream))

    return await respond(request, body, body.input, made)


async def classify(request: Request) -> GenerationResponse:
    """The probabilities of a classifier's labels."""
    body = await read_body(request, InputBody)
    llm: AsyncLLM = request.app.state.llm
    model, info = model_name(request, body.model), llm.inputs.need_pooling("classify")
    params = params_of(body)
    head = answer.AnswerHead("classify", "list", model)

    def made(stream: Stream) -> dict[str, Any]:
        data = []
        for i, one in enumerate(stream.requests):
            found = classification(one.vector, info, params)
            shown = {"label": found.label, "probs": found.probs, "num_classes": found.num_classes}
            data.append({"index": i, **shown})
        return head(data=data, usage=usage(stream))

    return await respond(request, body, body.input, made)


async def score(request: Request) -> GenerationResponse:
    """Similarity or relevance scores of pairs of texts."""
    body = await read_body(request, ScoreBody)
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    left, right = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
    with preparing(request):
        scoring = await llm.prepare.scoring(left, right, params_of(body))
    check_vectors(scoring.sources, llm, "text_2")
    head = answer.AnswerHead("score", "list", model)

    def made(stream: Stream) -> dict[str, Any]:
        scores = scoring.scores([one.vector for one in stream.requests])
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        return head(data=data, usage=usage(stream))

    return submit(request, body, scoring.sources, made)


async def rerank(request: Request) -> GenerationResponse:
    """Documents sorted by relevance to a query, best first."""
    body = await read_body(request, RerankBody)
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    names = {"text_1": "query", "text_2": "documents", "prompt": "documents"}
    with preparing(request), renamed_params(names):
        scoring = await llm.prepare.scoring([body.query], texts, params_of(body))
    check_vectors(scoring.sources, llm, "documents")
    head = answer.AnswerHead("rerank", "list", model)

    def made(stream: Stream) -> dict[str, Any]:
        scores = scoring.scores([one.vector for one in stream.requests])
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = []
        for i in best:
            shown = {"document": {"text": texts[i]}} if body.return_documents else {}
            results.append({"index": i, **shown, "relevance_score": scores[i]})
        return head(results=results, usage=usage(stream))

    return submit(request, body, scoring.sources, made)


def params_of(body: PooledBody, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(
        dimensions=dimensions,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


async def respond(
    request: Request, body: InputBody, given: str | list[Any], made: Made
) -> GenerationResponse:
    """The response for texts or token ids."""
    llm: AsyncLLM = request.app.state.llm
    prompts: list[Prompt] = [*split_inputs(given, name="input", most=MAX_INPUTS)]
    if not body.add_special_tokens:
        prompts = [
            {"prompt": one, "add_special_tokens": False} if isinstance(one, str) else one
            for one in prompts
        ]
    with preparing(request), renamed_params({"prompt": "input"}):
        sources = await llm.prepare.pooled(prompts, truncate=body.truncate_prompt_tokens)
    check_vectors(sources, llm, "input")
    return submit(request, body, sources, made)


def check_vectors(sources: Sequence[Input], llm: AsyncLLM, param: str) -> None:
    """Raises InvalidRequestError if the per-token vectors would have too many values."""
    info = llm.inputs.need_pooling()
    tokens = sum(len(source.prompt_token_ids) for source in sources) if info.of_tokens else 0
    if tokens * info.size > MAX_TOKEN_VALUES:
        raise InvalidRequestError(
            f"{tokens} tokens have {tokens * info.size} values ({info.size} each); the limit for a "
            f"call is {MAX_TOKEN_VALUES}. Send fewer texts in a call",
            param=param,
        )


def submit(
    request: Request, body: PooledBody, sources: Sequence[Input], made: Made
) -> GenerationResponse:
    state = request.app.state
    salt = cache_salt(request, body)
    call = PooledCall([source.salted(salt) for source in sources], made)
    rank = priority(state.llm, body)
    return GenerationResponse(state.llm, call, state.settings, state.metrics, priority=rank)


def written(values: array[float], encoding: str) -> list[float] | str:
    """Encode values as a list of numbers, or as base64 of little-endian float32."""
    if encoding == "float":
        return list(values)
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def usage(stream: Stream) -> dict[str, Any]:
    found = answer.usage(stream)
    del found["completion_tokens"]
    return found
