"""/completion, /infill, /embedding, /apply-template, /props: the API of ggml's HTTP server.

body -> OptionsBody.completion() -> Inputs -> GgmlCall -> content, tokens, timings
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc import __version__
from llmc.async_llm import AsyncLLM, Stream
from llmc.frontend.completion import CompletionDelta, PositionLogprobs
from llmc.frontend.inputs import Input, LineLimits, Prompt
from llmc.frontend.outputs import ActiveRequest
from llmc.frontend.pooling import check_params
from llmc.outputs import CompletionOutput
from llmc.pooling import PoolingParams, embedding, values_of
from llmc.sampling_params import SamplingParams
from llmc.server import answer
from llmc.server.adapters import adapter_named
from llmc.server.body import check_num_sequences, read_body
from llmc.server.errors import error_body, json_response
from llmc.server.ggml_protocol import (
    EUCLIDEAN,
    NAMES,
    ApplyTemplateBody,
    ContentBody,
    GgmlCompletionBody,
    InfillBody,
    OptionsBody,
    bias_pairs,
    split_prompts,
)
from llmc.server.models import model_name
from llmc.server.pooling import respond
from llmc.server.respond import Deltas, GenerationResponse, Wire, preparing, unnamed_event
from llmc.server.sampling import cache_salt, sampling_params
from llmc.server.settings import MAX_PROMPTS
from llmc.server.structured import grammar_field, grammar_from
from llmc.server.tokens import ONE_TOKEN
from llmc.server.tools import template_tools
from llmc.server.turn import prepare_messages, renamed_params

WIRE = Wire(event=unnamed_event, error=error_body)
NO_SLOT = -1


async def completion(request: Request) -> GenerationResponse:
    """Continue texts or token ids."""
    body = await read_body(request, GgmlCompletionBody)
    given = split_prompts(body.prompt, most=MAX_PROMPTS)
    check_num_sequences(len(given), body.n_cmpl, "n_cmpl")
    llm: AsyncLLM = request.app.state.llm
    llm.inputs.need_generation()
    with preparing(request):
        prompts = [await llm.prepare.joined(parts) for parts in given]
    is_several = len(given) * body.n_cmpl > 1
    return await _generation(request, body, prompts, is_several=is_several)


async def infill(request: Request) -> GenerationResponse:
    """Fill in between two texts, with the model's fill-in-the-middle tokens."""
    body = await read_body(request, InfillBody)
    llm: AsyncLLM = request.app.state.llm
    llm.inputs.need_generation()
    with preparing(request), renamed_params({"prompt": "input_prefix", "suffix": "input_suffix"}):
        (prompt,), ends = await llm.prepare.infill(
            [body.input_prefix],
            body.input_suffix,
            extra=[(one.filename, one.text) for one in body.input_extra or ()],
            beginning=body.prompt,
            num_reserved=max(0, body.n_predict or 0),
        )
    return await _generation(request, body, [prompt], is_several=body.n_cmpl > 1, ends=ends)


async def _generation(
    request: Request,
    body: OptionsBody,
    prompts: Sequence[Prompt],
    *,
    is_several: bool,
    ends: frozenset[int] = frozenset(),
) -> GenerationResponse:
    """`ends`: tokens that end an answer, besides the model's own."""
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    with renamed_params(NAMES):
        with preparing(request):
            bias = await _bias_by_token(llm, body)
        equal = body.completion([0], bias)
        equal.stop_token_ids = sorted(ends) or None
        is_endless = body.n_predict is None or body.n_predict < 0
        sampling = sampling_params(
            equal,
            llm.inputs,
            max_tokens=0 if body.n_predict == 0 else None,
            logprobs=equal.logprobs,
        )
        with preparing(request), grammar_from(grammar_field(equal)):
            sources = await llm.prepare.prompts(prompts, sampling)
    if not is_endless:
        sources = [source.with_most(body.n_predict or 0) for source in sources]
    if body.n_indent or (body.t_max_predict_ms or 0) > 0:
        most_ms = body.t_max_predict_ms or 0
        limits = LineLimits(
            indent=body.n_indent or 0, seconds=most_ms / 1e3 if most_ms > 0 else None
        )
        sources = [source.limited(limits) for source in sources]
    salt, adapter = cache_salt(request, None), adapter_named(request, model)
    sources = [source.salted(salt).with_adapter(adapter) for source in sources]
    call = GgmlCall(llm, body, model, sources, is_several=is_several)
    state = request.app.state
    return GenerationResponse(llm, call, state.settings, state.metrics)


async def _bias_by_token(llm: AsyncLLM, body: OptionsBody) -> dict[str, float] | None:
    """`logit_bias` by token id. The bias of a text is that of each of its tokens."""
    by_token: dict[str, float] = {}
    for given, bias in bias_pairs(body.logit_bias):
        if isinstance(given, int):
            token_ids = [given]
        else:
            token_ids = await llm.prepare.encode(given, add_special_tokens=False)
        by_token |= {str(token): bias for token in token_ids}
    return by_token or None


class GgmlCall:
    """Builds the response to one call: one object per completion, numbered over all prompts."""

    wire = WIRE

    def __init__(
        self,
        llm: AsyncLLM,
        body: OptionsBody,
        model: str,
        sources: Sequence[Input],
        *,
        is_several: bool,
    ) -> None:
        self.sources = sources
        self.stream = body.stream
        self._llm = llm
        self._body = body
        self._model = model
        self._is_several = is_several

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        for prompt, delta in deltas:
            request = stream.requests[prompt]
            one = request.completions[delta.index]
            if delta.text or delta.token_ids:
                yield {
                    "index": self._index(prompt, delta.index),
                    "content": delta.text,
                    "tokens": list(delta.token_ids),
                    "stop": False,
                    "id_slot": NO_SLOT,
                    "tokens_predicted": len(one.token_ids),
                    "tokens_evaluated": len(request.source.prompt_token_ids),
                    **self._probabilities(delta),
                }
            if delta.finish_reason not in (None, "abort"):  # which is an error at the end
                yield self._last(prompt, request, one.output(), content="", tokens=[])

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        answer.check_not_aborted(stream)
        return ()

    def body(self, stream: Stream) -> Any:
        answer.check_not_aborted(stream)
        made = []
        for prompt, request in enumerate(stream.requests):
            for one in request.output().outputs:
                tokens = list(one.token_ids) if self._body.return_tokens else []
                whole = self._last(prompt, request, one, content=one.text, tokens=tokens)
                made.append({**whole, **self._probabilities(one)})
        shown = [self._chosen_fields(one) for one in made]
        return shown if self._is_several else shown[0]

    def _index(self, prompt: int, completion: int) -> int:
        return prompt * self._body.n_cmpl + completion

    def _last(
        self,
        prompt: int,
        request: ActiveRequest,
        one: CompletionOutput,
        *,
        content: str,
        tokens: list[int],
    ) -> dict[str, Any]:
        """The object of a completion that has ended."""
        source = request.source
        num_prompt, num_output = len(source.prompt_token_ids), len(one.token_ids)
        limit = self._llm.info.max_model_len
        return {
            "index": self._index(prompt, one.index),
            "content": content,
            "tokens": tokens,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": num_output,
            "tokens_evaluated": num_prompt,
            "tokens_cached": request.num_cached_tokens,
            "generation_settings": settings(source.sampling, limit),
            "prompt": source.prompt if source.prompt is not None else self._text(source),
            "has_new_line": "\n" in one.text,
            "truncated": one.finish_reason == "length" and num_prompt + num_output >= limit,
            "stop_type": _stop_type(one),
            "stopping_word": one.stop_reason if isinstance(one.stop_reason, str) else "",
            "timings": _timings(request, num_output),
        }

    def _text(self, source: Input) -> str:
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(source.prompt_token_ids, skip_special_tokens=False)

    def _probabilities(self, part: CompletionDelta | CompletionOutput) -> dict[str, Any]:
        if not self._body.n_probs:
            return {}
        positions: Sequence[PositionLogprobs] = part.logprobs or ()
        pairs = zip(part.token_ids, positions, strict=True)
        return {"completion_probabilities": [self._position(*pair) for pair in pairs]}

    def _position(self, token: int, position: PositionLogprobs) -> dict[str, Any]:
        top = answer.top(position, self._body.n_probs)
        return {
            **self._token(token, position[token].logprob),
            "top_logprobs": [self._token(other, one.logprob) for other, one in top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._llm.tokenizer
        return {
            "id": token,
            "token": answer.spelling(tokenizer, token),
            "bytes": answer.token_bytes(tokenizer, token),
            "logprob": answer.finite(logprob),
        }

    def _chosen_fields(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Those in `response_fields`; a/b is the field b of the object a, under the name b."""
        if self._body.response_fields is None:
            return whole
        chosen: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = whole
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path.rpartition("/")[2]] = value
        return chosen


def _stop_type(one: CompletionOutput) -> str:
    if one.finish_reason == "length":
        return "limit"
    return "word" if isinstance(one.stop_reason, str) else "eos"


def _timings(request: ActiveRequest, num_output: int) -> dict[str, Any]:
    now = request.ended or time.monotonic()
    first = request.first_token or now
    num_cached = request.num_cached_tokens
    num_prompt = len(request.source.prompt_token_ids) - num_cached
    return {
        "cache_n": num_cached,
        **_rate("prompt", num_prompt, first - request.submitted),
        **_rate("predicted", num_output, now - first),
    }


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, count),
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


def settings(sampling: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """The sampling parameters under this API's names."""
    endless = -1
    return {
        "n_predict": endless if sampling.max_tokens is None else sampling.max_tokens,
        "n_ctx": max_model_len,
        "seed": endless if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": max(0, sampling.top_k),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop_strings),
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
    }


async def props(request: Request) -> Response:
    """Properties of the server and of its model. No paths: those are not for clients."""
    state = request.app.state
    llm: AsyncLLM = state.llm
    tokenizer = llm.tokenizer
    defaults = dataclasses.replace(llm.inputs.default_sampling(), max_tokens=None)
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": llm.info.max_model_len,
                "params": settings(defaults, llm.info.max_model_len),
            },
            "total_slots": llm.config.max_num_seqs,
            "model_alias": state.names[0],
            "model_path": state.names[0],
            "chat_template": (tokenizer.chat_template if tokenizer is not None else None) or "",
            "bos_token": _token_text(llm, "bos_token_id"),
            "eos_token": _token_text(llm, "eos_token_id"),
            "modalities": {"vision": llm.info.images is not None, "audio": False},
            "build_info": f"llmc {__version__}",
            "is_sleeping": bool(state.sleeper.level),
        }
    )


def _token_text(llm: AsyncLLM, name: str) -> str:
    token = getattr(llm.tokenizer, name, None)
    return "" if token is None or llm.tokenizer is None else llm.tokenizer.token_text(token)


async def apply_template(request: Request) -> Response:
    """The prompt that the model's chat template makes of messages, as text."""
    body = await read_body(request, ApplyTemplateBody)
    model_name(request, body.model)
    llm: AsyncLLM = request.app.state.llm
    llm.inputs.need_generation()
    with preparing(request, submits=False):
        source = await prepare_messages(
            llm, body, ONE_TOKEN, body.chat_template_kwargs or {}, template_tools(body.tools)
        )
        return json_response({"prompt": await llm.prepare.decode(source.prompt_token_ids)})


async def embed(request: Request) -> GenerationResponse:
    """Embeddings of texts. Each is the only one in a list, as this API has one per token too."""
    body = await read_body(request, ContentBody)
    llm: AsyncLLM = request.app.state.llm
    model_name(request, body.model)
    info = llm.inputs.need_pooling("embed")
    params = PoolingParams(use_activation=body.embd_normalize == EUCLIDEAN)
    check_params(params, info)

    def made(stream: Stream) -> Any:
        vectors = (embedding(values_of(one.vector), info, params) for one in stream.requests)
        return [{"index": i, "embedding": [list(one)]} for i, one in enumerate(vectors)]

    with renamed_params({"input": "content"}):
        return await respond(request, body, body.input, made)
