"""POST /v1/completions: text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import PositionLogprobs
from llmc.frontend.inputs import Input, Prompt
from llmc.frontend.outputs import ActiveRequest
from llmc.server import answer
from llmc.server.adapters import adapter_named
from llmc.server.body import check_num_sequences, read_body, split_inputs
from llmc.server.models import model_name
from llmc.server.protocol import CompletionBody
from llmc.server.respond import OPENAI, Deltas, GenerationResponse, preparing
from llmc.server.sampling import cache_salt, priority, sampling_params
from llmc.server.settings import MAX_PROMPTS
from llmc.server.structured import grammar_field, grammar_from

DEFAULT_MAX_TOKENS = 16

# Token ids and their logprobs; None for the first token of a prompt.
Scored = tuple[Sequence[int], Sequence[PositionLogprobs | None]]


async def create_completion(request: Request) -> GenerationResponse:
    state = request.app.state
    body = await read_body(request, CompletionBody)
    model = model_name(request, body.model)
    prompts: list[Prompt] = [*_prompts(body)]
    if not body.add_special_tokens:
        prompts = [
            {"prompt": one, "add_special_tokens": False} if isinstance(one, str) else one
            for one in prompts
        ]
    each, param = body.best_of or body.n, "n" if body.best_of is None else "best_of"
    check_num_sequences(len(prompts), each, param)
    llm: AsyncLLM = state.llm
    with preparing(request):
        sources = await _sources(llm, body, prompts)
    salt, adapter = cache_salt(request, body), adapter_named(request, model)
    sources = [source.salted(salt).with_adapter(adapter) for source in sources]
    call = CompletionCall(llm, body, model, sources)
    rank = priority(llm, body)
    return GenerationResponse(llm, call, state.settings, state.metrics, priority=rank)


async def _sources(llm: AsyncLLM, body: CompletionBody, prompts: list[Prompt]) -> list[Input]:
    if body.suffix:
        llm.inputs.need_generation()
        prompts, ends = await _infill(llm, body)
        body.stop_token_ids = sorted(ends.union(body.stop_token_ids or ()))
    sampling = sampling_params(
        body,
        llm.inputs,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        best_of=body.best_of,
        prompt_logprobs=_prompt_logprobs(body),
    )
    with grammar_from(grammar_field(body)):
        return await llm.prepare.prompts(prompts, sampling)


async def _infill(llm: AsyncLLM, body: CompletionBody) -> tuple[list[Prompt], frozenset[int]]:
    """Fill-in-the-middle prompts, from each prompt and the suffix, and the extra stop tokens."""
    prompts = _prompts(body)
    before = [one for one in prompts if isinstance(one, str)]
    if len(before) < len(prompts):
        raise InvalidRequestError(
            "suffix needs text prompts; a prompt of token ids can contain the model's "
            "fill-in-the-middle tokens itself",
            param="suffix",
        )
    for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise InvalidRequestError(
                f"{name} and suffix can't be combined: the model's prompt is built from both",
                param=name,
            )
    special = body.add_special_tokens
    return await llm.prepare.infill(before, body.suffix or "", add_special_tokens=special)


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """How many prompt logprobs to compute: the requested number, and what an echo shows."""
    counts = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((count for count in counts if count is not None), default=None)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    return split_inputs(body.prompt, name="prompt", most=MAX_PROMPTS)


class CompletionCall:
    """Builds the response to one call; choices are numbered consecutively over all prompts."""

    def __init__(
        self, llm: AsyncLLM, body: CompletionBody, model: str, sources: Sequence[Input]
    ) -> None:
        self.sources = sources
        self.stream = body.stream
        self.wire = OPENAI
        self._tokenizer = llm.tokenizer
        self._n = body.n
        self._echo = body.echo
        self._top = body.logprobs
        self._token_ids = body.return_token_ids
        self._as_ids = body.return_tokens_as_token_ids
        self._prompt_logprobs = body.prompt_logprobs
        self._options = body.stream_options
        self._head = answer.AnswerHead("cmpl", "text_completion", model, body.request_id)
        self._started: set[int] = set()
        self._offsets: dict[int, int] = {}

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        for prompt, delta in deltas:
            index = prompt * self._n + delta.index
            text = delta.text
            scored: Scored = delta.token_ids, delta.logprobs
            if index not in self._started:
                self._started.add(index)
                text = self._prefix(prompt) + text
                scored = self._echoed(stream.requests[prompt], delta.token_ids, delta.logprobs)
            choice = self._choice(index, text, scored, delta)
            if self._token_ids:
                choice["token_ids"] = list(delta.token_ids)
            chunk = self._head(choices=[choice])
            if self._options is not None and self._options.continuous_usage_stats:
                chunk["usage"] = answer.usage(stream)
            yield chunk

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        if self._options is not None and self._options.include_usage:
            yield self._head(choices=[], usage=answer.usage(stream))

    def body(self, stream: Stream) -> dict[str, Any]:
        choices = []
        for prompt, request in enumerate(stream.requests):
            for one in request.output().outputs:
                index = prompt * self._n + one.index
                text = self._prefix(prompt) + one.text
                scored = self._echoed(request, one.token_ids, one.logprobs or ())
                choice = self._choice(index, text, scored, one)
                if self._prompt_logprobs is not None:
                    logprobs = answer.prompt_logprobs(request, self._prompt_logprobs)
                    choice["prompt_logprobs"] = logprobs
                if self._token_ids:
                    choice["token_ids"] = list(one.token_ids)
                    choice["prompt_token_ids"] = request.source.prompt_token_ids
                choices.append(choice)
        return self._head(choices=choices, usage=answer.usage(stream))

    def _choice(self, index: int, text: str, scored: Scored, end: Any) -> dict[str, Any]:
        """`end` has finish_reason and stop_reason, as outputs and deltas do."""
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, *scored),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _echoed(
        self,
        request: ActiveRequest,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
    ) -> Scored:
        """An output's first tokens, preceded by the prompt's tokens if they are echoed."""
        if not self._echo or request.prompt_logprobs is None:
            return token_ids, logprobs
        prompt = request.source.prompt_token_ids
        return [*prompt, *token_ids], [*request.prompt_logprobs, *logprobs]

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any] | None:
        if self._top is None:
            return None
        offset = self._offsets.get(index, 0)
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, position in zip(token_ids, logprobs, strict=True):
            tokens.append(self._named(token))
            offsets.append(offset)
            offset += len(answer.spelling(self._tokenizer, token))
            if position is None:  # the first token of a prompt
                values.append(None)
                tops.append(None)
                continue
            shown = [(token, position[token]), *answer.top(position, self._top)]
            values.append(answer.finite(position[token].logprob))
            tops.append({self._named(i): answer.finite(p.logprob) for i, p in shown})
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _named(self, token: int) -> str:
        return answer.spelling(None if self._as_ids else self._tokenizer, token)

    def _prefix(self, prompt: int) -> str:
        if not self._echo:
            return ""
        source = self.sources[prompt]
        if source.prompt is not None:
            return source.prompt
        return self._tokenizer.decode(source.prompt_token_ids) if self._tokenizer else ""
