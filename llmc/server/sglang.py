"""/generate, /get_model_info: SGLang's own API.

body -> SamplingBody.completion() -> Inputs -> SglangCall -> text, output_ids, meta_info

Each event of a stream has the whole text so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import PositionLogprobs
from llmc.frontend.inputs import Input
from llmc.frontend.outputs import ActiveRequest
from llmc.outputs import CompletionOutput
from llmc.server import answer
from llmc.server.adapters import adapter_named
from llmc.server.body import check_num_sequences, read_body
from llmc.server.errors import json_response
from llmc.server.models import model_name
from llmc.server.respond import OPENAI, Deltas, GenerationResponse, preparing
from llmc.server.sampling import cache_salt, priority, sampling_params
from llmc.server.sglang_protocol import NAMES, SamplingBody, SglangBody
from llmc.server.structured import grammar_field, grammar_from
from llmc.server.turn import renamed_params

# A log-probability, the token's id, and its text if that was requested.
Scored = tuple[float | None, int, str | None]


async def generate(request: Request) -> GenerationResponse:
    """Continue texts or token ids."""
    body = await read_body(request, SglangBody)
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.lora_path or body.model)
    llm.inputs.need_generation()
    prompts = body.prompts()
    asked = body.sampling(len(prompts))
    check_num_sequences(len(prompts), asked[0].n, "sampling_params.n")
    if _scores_prompt(body) and body.stream:
        raise InvalidRequestError(
            "logprob_start_len can't be combined with stream: log-probabilities of the prompt "
            "can't be streamed",
            param="logprob_start_len",
        )
    sources: list[Input] = []
    with renamed_params(NAMES), renamed_params({"prompt": _prompt_field(body)}):
        if isinstance(body.sampling_params, SamplingBody):
            sources = await _sources(request, body, prompts, body.sampling_params)
        else:
            for prompt, sampling in zip(prompts, asked, strict=True):
                sources += await _sources(request, body, [prompt], sampling)
    salt, adapter = cache_salt(request, None), adapter_named(request, model)
    sources = [source.salted(salt).with_adapter(adapter) for source in sources]
    rank = priority(llm, body)
    state = request.app.state
    call = SglangCall(llm, body, sources, num_completions=asked[0].n)
    return GenerationResponse(llm, call, state.settings, state.metrics, priority=rank)


def _prompt_field(body: SglangBody) -> str:
    return "text" if body.text is not None else "input_ids"


def _scores_prompt(body: SglangBody) -> bool:
    return body.return_logprob and body.logprob_start_len >= 0


async def _sources(
    request: Request,
    body: SglangBody,
    prompts: Sequence[str | list[int]],
    sampling: SamplingBody,
) -> list[Input]:
    llm: AsyncLLM = request.app.state.llm
    equal = sampling.completion(body)
    params = sampling_params(
        equal,
        llm.inputs,
        max_tokens=sampling.max_new_tokens,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        prompt_logprobs=body.top_logprobs_num if _scores_prompt(body) else None,
    )
    with preparing(request), grammar_from(grammar_field(equal)):
        return await llm.prepare.prompts(prompts, params)


class SglangCall:
    """Builds the response to one call: one object per completion."""

    wire = OPENAI

    def __init__(
        self, llm: AsyncLLM, body: SglangBody, sources: Sequence[Input], *, num_completions: int
    ) -> None:
        self.sources = sources
        self.stream = body.stream
        self._llm = llm
        self._body = body
        self._num_completions = num_completions

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        for prompt, delta in deltas:
            request = stream.requests[prompt]
            one = request.completions[delta.index].output()
            index = {"index": prompt * self._num_completions + delta.index}
            yield {**self._shown(request, one), **(index if self._body.is_several else {})}

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        return ()

    def body(self, stream: Stream) -> Any:
        made = [
            self._shown(request, one)
            for request in stream.requests
            for one in request.output().outputs
        ]
        return made if self._body.is_several else made[0]

    def _shown(self, request: ActiveRequest, one: CompletionOutput) -> dict[str, Any]:
        prompt = request.source.prompt_token_ids
        meta: dict[str, Any] = {
            "id": request.request_id,
            "finish_reason": self._finish_reason(one),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(one.token_ids),
            "cached_tokens": request.num_cached_tokens,
            "e2e_latency": (request.ended or time.monotonic()) - request.submitted,
        }
        if self._body.return_logprob:
            start = self._body.logprob_start_len
            scores = request.prompt_logprobs
            if scores is not None:
                given = list(zip(prompt, scores, strict=True))[start:]
                meta |= self._logprobs("input", given)
            else:
                meta |= self._logprobs("input", [])
            said = list(zip(one.token_ids, one.logprobs or (), strict=True))
            meta |= self._logprobs("output", said)
        return {"text": one.text, "output_ids": list(one.token_ids), "meta_info": meta}

    def _finish_reason(self, one: CompletionOutput) -> dict[str, Any] | None:
        match one.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(one.token_ids)}
            case "abort":
                return {"type": "abort", "message": answer.ABORTED}
        matched = one.stop_reason
        if matched is None and one.token_ids:  # the model's own end
            matched = one.token_ids[-1]
        return {"type": "stop", "matched": matched}

    def _logprobs(
        self, name: str, scored: Sequence[tuple[int, PositionLogprobs | None]]
    ) -> dict[str, Any]:
        count = self._body.top_logprobs_num
        fields: dict[str, Any] = {
            f"{name}_token_logprobs": [
                self._scored(token, None if at is None else at[token].logprob)
                for token, at in scored
            ]
        }
        if count:
            fields[f"{name}_top_logprobs"] = [
                None
                if at is None
                else [self._scored(token, one.logprob) for token, one in answer.top(at, count)]
                for _, at in scored
            ]
        return fields

    def _scored(self, token: int, logprob: float | None) -> Scored:
        text = None
        if self._body.return_text_in_logprobs and self._llm.tokenizer is not None:
            text = self._llm.tokenizer.token_text(token)
        return None if logprob is None else answer.finite(logprob), token, text


async def model_info(request: Request) -> Response:
    """What is served. No paths: those are not for clients."""
    state = request.app.state
    info = state.llm.info
    return json_response(
        {
            "model_path": state.names[0],
            "tokenizer_path": state.names[0],
            "is_generation": info.pooling is None,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": info.images is not None,
            "has_audio_understanding": False,
        }
    )
