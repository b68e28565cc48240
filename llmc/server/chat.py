"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.front.completion import PositionLogprobs
from llmc.front.inputs import Input
from llmc.sampling_params import SamplingParams
from llmc.server import answer
from llmc.server.body import read_body
from llmc.server.models import model_name
from llmc.server.protocol import ChatBody, TokenizeBody
from llmc.server.respond import Deltas, GenerationResponse
from llmc.server.sampling import cache_salt, priority, sampling_params
from llmc.server.structured import blaming

ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_LACK_CONTENT = ("assistant",)


async def create_chat_completion(request: Request) -> GenerationResponse:
    state = request.app.state
    body = await read_body(request, ChatBody)
    model = model_name(request, body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    llm: AsyncLLM = state.llm
    sampling = sampling_params(
        body,
        llm.inputs,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra["reasoning_effort"] = body.reasoning_effort
    with blaming(body):
        source = await prepare_messages(llm, body, body.messages, sampling, extra)
    call = ChatCall(llm, body, model, source.salted(cache_salt(request, body)))
    rank = priority(llm, body)
    return GenerationResponse(llm, call, state.settings, state.metrics, priority=rank)


async def prepare_messages(
    llm: AsyncLLM,
    body: ChatBody | TokenizeBody,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    extra: Mapping[str, Any],
) -> Input:
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    return await llm.prepare_chat(
        messages,
        sampling,
        # Said or not, a new turn can't begin inside the one that is continued.
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=extra,
    )


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.80}",
            param=f"{where}.role",
        )
    if message.get("content") is None and role not in MAY_LACK_CONTENT:
        raise InvalidRequestError(
            f"{where}.content is missing; a message of role {role} needs text",
            param=f"{where}.content",
        )


class ChatCall:
    """Writes down the answer of one chat call."""

    def __init__(self, llm: AsyncLLM, body: ChatBody, model: str, source: Input) -> None:
        self.sources: Sequence[Input] = [source]
        self.stream = body.stream
        self._tokenizer = llm.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._prompt_logprobs = body.prompt_logprobs
        self._token_ids = body.return_token_ids
        self._options = body.stream_options
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = answer.Head("chatcmpl", kind, model)
        self._introduced = False

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        if not self._introduced:
            self._introduced = True
            for completion in stream.requests[0].completions:
                yield self._chunk(
                    stream, completion.index, {"role": "assistant", "content": ""}, (), (), None
                )
        for _, delta in deltas:
            content = {"content": delta.text} if delta.text else {}
            yield self._chunk(stream, delta.index, content, delta.token_ids, delta.logprobs, delta)

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        if self._options is not None and self._options.include_usage:
            yield self._head(choices=[], usage=answer.usage(stream))

    def body(self, stream: Stream) -> dict[str, Any]:
        [request] = stream.requests
        choices = []
        for one in request.output().outputs:
            message = {"role": "assistant", "content": one.text, "refusal": None}
            choice = {
                "index": one.index,
                "message": message,
                "logprobs": self._logprobs(one.token_ids, one.logprobs or ()),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            if self._token_ids:
                choice["token_ids"] = one.token_ids
            choices.append(choice)
        body = self._head(choices=choices, usage=answer.usage(stream))
        if self._token_ids:
            body["prompt_token_ids"] = request.source.prompt_token_ids
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = answer.prompt_logprobs(request, self._prompt_logprobs)
        return body

    def _chunk(
        self,
        stream: Stream,
        index: int,
        delta: dict[str, Any],
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
        end: Any,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(token_ids, logprobs) if token_ids else None,
            "finish_reason": end.finish_reason if end is not None else None,
        }
        if end is not None and end.finish_reason is not None:
            choice["stop_reason"] = end.stop_reason
        if self._token_ids:
            choice["token_ids"] = list(token_ids)
        chunk = self._head(choices=[choice])
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = answer.usage(stream)
        return chunk

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]
    ) -> dict[str, Any] | None:
        if self._top is None:
            return None
        content = []
        for token, position in zip(token_ids, logprobs, strict=True):
            entry = self._entry(token, position[token].logprob)
            entry["top_logprobs"] = [
                self._entry(i, p.logprob) for i, p in answer.top(position, self._top)
            ]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": answer.spelling(self._tokenizer, token),
            "logprob": answer.finite(logprob),
            "bytes": answer.token_bytes(self._tokenizer, token),
        }
