"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from llmc.async_llm import Stream
from llmc.frontend.completion import CompletionDelta, PositionLogprobs
from llmc.frontend.inputs import Input
from llmc.server import answer
from llmc.server.body import read_body
from llmc.server.protocol import ChatBody
from llmc.server.respond import OPENAI, Deltas, GenerationResponse
from llmc.server.tools import delta_fields
from llmc.server.turn import Answer, AnswerReader, Turn, prepare_turn
from llmc.text.tools.parse import Delta


async def create_chat_completion(request: Request) -> GenerationResponse:
    body = await read_body(request, ChatBody)
    turn = await prepare_turn(request, body)
    return turn.respond(request, ChatCall(turn, body))


class ChatCall:
    """Builds the response to one chat call."""

    def __init__(self, turn: Turn, body: ChatBody) -> None:
        self.sources: Sequence[Input] = [turn.source]
        self.stream = body.stream
        self.wire = OPENAI
        self._turn = turn
        self._readers: list[AnswerReader] = []  # of the choices of a stream
        self._shows_reasoning = body.include_reasoning
        self._tokenizer = turn.llm.tokenizer
        self._top = body.num_logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._token_ids = body.return_token_ids
        self._as_ids = body.return_tokens_as_token_ids
        self._options = body.stream_options
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = answer.AnswerHead("chatcmpl", kind, turn.model, body.request_id)

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        if not self._readers:
            for completion in stream.requests[0].completions:
                self._readers.append(self._turn.reader())
                yield self._chunk(
                    stream, completion.index, {"role": "assistant", "content": ""}, (), (), None
                )
        for _, delta in deltas:
            yield from self._of_delta(stream, delta, self._readers[delta.index])

    def _of_delta(
        self, stream: Stream, delta: CompletionDelta, reader: AnswerReader
    ) -> Iterable[dict[str, Any]]:
        """One event per part of the answer and per piece of a tool call. The first carries the
        token ids and logprobs, the last the finish reason."""
        events = [event for one in reader.read(delta) for event in self._events(one)]
        # Unless the answer is split, every delta is an event: clients can time each token.
        is_shown = not self._turn.splits or self._top is not None or self._token_ids
        if not events and (delta.finish_reason or is_shown):
            events.append({})
        called = delta.finish_reason == "stop" and reader.has_called
        for place, fields in enumerate(events):
            tokens = (delta.token_ids, delta.logprobs) if place == 0 else ((), ())
            last = delta if place == len(events) - 1 else None
            yield self._chunk(stream, delta.index, fields, *tokens, last, called=called)

    def _events(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if delta.reasoning and self._shows_reasoning:
            yield {"reasoning_content": delta.reasoning}
        if delta.content:
            yield {"content": delta.content}
        for call in delta.calls:
            yield {"tool_calls": [delta_fields(call)]}

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        if self._options is not None and self._options.include_usage:
            yield self._head(choices=[], usage=self._usage(stream))

    def body(self, stream: Stream) -> dict[str, Any]:
        [request] = stream.requests
        choices = []
        for one in request.output().outputs:
            read = self._turn.read(one)
            reason: str | None = one.finish_reason
            if read.calls and reason == "stop":
                reason = "tool_calls"
            choice = {
                "index": one.index,
                "message": self._message(read),
                "logprobs": self._logprobs(one.token_ids, one.logprobs or ()),
                "finish_reason": reason,
                "stop_reason": one.stop_reason,
            }
            if self._token_ids:
                choice["token_ids"] = one.token_ids
            choices.append(choice)
        body = self._head(choices=choices, usage=self._usage(stream))
        if self._token_ids:
            body["prompt_token_ids"] = request.source.prompt_token_ids
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = answer.prompt_logprobs(request, self._prompt_logprobs)
        return body

    def _message(self, read: Answer) -> dict[str, Any]:
        content = read.content or None if read.calls else read.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if read.reasoning and self._shows_reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [call.fields() for call in read.calls]
        return message

    def _usage(self, stream: Stream) -> dict[str, Any]:
        usage = answer.usage(stream)
        if self._turn.source.reasoning is not None:
            count = self._turn.num_reasoning_tokens(stream)
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

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
        content = answer.logprobs(
            self._tokenizer, token_ids, logprobs, self._top, as_ids=self._as_ids
        )
        return {"content": content, "refusal": None}
