"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from llmc.async_llm import AsyncLLM, Stream
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import CompletionDelta, PositionLogprobs
from llmc.frontend.inputs import Input
from llmc.sampling_params import SamplingParams
from llmc.server import answer
from llmc.server.body import read_body
from llmc.server.models import model_name
from llmc.server.protocol import ChatBody, TokenizeBody
from llmc.server.respond import Deltas, GenerationResponse
from llmc.server.sampling import cache_salt, priority, sampling_params
from llmc.server.structured import blaming
from llmc.server.tools import (
    ToolUse,
    blaming_tools,
    delta_fields,
    message_fields,
    tool_use,
)
from llmc.text.tools.parse import ToolParser

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
    use = await tool_use(llm, body)
    if use is not None and sampling.structured_outputs is not None:
        raise InvalidRequestError(
            "tools can't be combined with a grammar for the answer; leave one of them out, or "
            "set tool_choice to none",
            param="tools",
        )
    if use is None:
        with blaming(body):
            source = await prepare_messages(llm, body, body.messages, sampling, extra)
    else:
        with blaming_tools():
            sampling = dataclasses.replace(sampling, structured_outputs=use.grammar)
            source = await prepare_messages(llm, body, body.messages, sampling, extra, use.tools)
        source = use.applied(source, llm.inputs.need_tokenizer("tools"))
    call = ChatCall(llm, body, model, source.salted(cache_salt(request, body)), use)
    rank = priority(llm, body)
    return GenerationResponse(llm, call, state.settings, state.metrics, priority=rank)


async def prepare_messages(
    llm: AsyncLLM,
    body: ChatBody | TokenizeBody,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    extra: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Input:
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    return await llm.prepare_chat(
        messages,
        sampling,
        tools=tools,
        # Whatever was asked, a new turn can't begin inside the one that is continued.
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
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequestError(
            f"{where}.tool_call_id must be the id of the call that this answers, "
            f"got {message.get('tool_call_id')!r:.80}",
            param=f"{where}.tool_call_id",
        )
    if role != "assistant" and message.get("tool_calls"):
        raise InvalidRequestError(
            f"{where}.tool_calls is for messages of role assistant", param=f"{where}.tool_calls"
        )


class ChatCall:
    """Builds the answer of one chat call."""

    def __init__(
        self, llm: AsyncLLM, body: ChatBody, model: str, source: Input, use: ToolUse | None
    ) -> None:
        self.sources: Sequence[Input] = [source]
        self._use = use
        self._parsers: list[ToolParser] = []  # of the choices of a stream with tools
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
            if self._use is not None:
                count = len(stream.requests[0].completions)
                self._parsers = [self._use.parser(streams=True) for _ in range(count)]
        for _, delta in deltas:
            if self._parsers:
                yield from self._tool_chunks(stream, delta, self._parsers[delta.index])
                continue
            content = {"content": delta.text} if delta.text else {}
            yield self._chunk(stream, delta.index, content, delta.token_ids, delta.logprobs, delta)

    def _tool_chunks(
        self, stream: Stream, delta: CompletionDelta, parser: ToolParser
    ) -> Iterable[dict[str, Any]]:
        """An event for the content and one for each piece of a call; what tokens say comes with
        the first, and the end with the last."""
        found = [parser.push(delta.text)]
        if delta.finish_reason is not None:
            found.append(parser.finish())
        said = "".join(one.content for one in found)
        events: list[dict[str, Any]] = [{"content": said}] if said else []
        events += [{"tool_calls": [call]} for one in found for call in map(delta_fields, one.calls)]
        if not events and (delta.finish_reason or self._top is not None or self._token_ids):
            events.append({})
        called = delta.finish_reason == "stop" and parser.num_calls > 0
        for place, fields in enumerate(events):
            tokens = (delta.token_ids, delta.logprobs) if place == 0 else ((), ())
            last = delta if place == len(events) - 1 else None
            yield self._chunk(stream, delta.index, fields, *tokens, last, called=called)

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        if self._options is not None and self._options.include_usage:
            yield self._head(choices=[], usage=answer.usage(stream))

    def body(self, stream: Stream) -> dict[str, Any]:
        [request] = stream.requests
        choices = []
        for one in request.output().outputs:
            message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
            reason: str | None = one.finish_reason
            if self._use is not None:
                message["content"], calls = message_fields(self._use, one.text)
                if calls:
                    message["tool_calls"] = calls
                    reason = "tool_calls" if reason == "stop" else reason
            choice = {
                "index": one.index,
                "message": message,
                "logprobs": self._logprobs(one.token_ids, one.logprobs or ()),
                "finish_reason": reason,
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
        end: CompletionDelta | None,
        *,
        called: bool = False,
    ) -> dict[str, Any]:
        reason: str | None = end.finish_reason if end is not None else None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(token_ids, logprobs) if token_ids else None,
            "finish_reason": "tool_calls" if reason and called else reason,
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
