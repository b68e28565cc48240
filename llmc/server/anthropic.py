"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over a chat call."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import Stream
from llmc.frontend.inputs import Input
from llmc.outputs import CompletionOutput
from llmc.server import answer
from llmc.server.anthropic_protocol import NAMES, CountTokensBody, MessagesBody
from llmc.server.body import read_body
from llmc.server.errors import anthropic_error, json_response
from llmc.server.respond import Deltas, GenerationResponse, Wire, named_event
from llmc.server.turn import Answer, Turn, prepare_turn, renamed_params
from llmc.text.tools.parse import CallDelta, Delta

WIRE = Wire(event=named_event, error=anthropic_error)


async def create_message(request: Request) -> GenerationResponse:
    body = await read_body(request, MessagesBody)
    with renamed_params(NAMES):
        turn = await prepare_turn(request, body.chat())
    return turn.respond(request, MessageCall(turn.with_most(body.max_tokens), body))


async def count_tokens(request: Request) -> Response:
    body = await read_body(request, CountTokensBody)
    with renamed_params(NAMES):
        turn = await prepare_turn(request, body.chat(max_tokens=1), submits=False)
    return json_response({"input_tokens": len(turn.source.prompt_token_ids)})


class MessageCall:
    """Builds the response to one call: a message of content blocks, numbered in order."""

    wire = WIRE

    def __init__(self, turn: Turn, body: MessagesBody) -> None:
        self.sources: Sequence[Input] = [turn.source]
        self.stream = body.stream
        self._turn = turn
        self._max_tokens = body.max_tokens
        self._reader = turn.reader()
        self._shows_reasoning = body.shows_reasoning
        self._id = f"msg_{uuid.uuid4().hex}"
        self._index = -1  # of the block that is open or was last
        self._open = ""  # its type
        self._has_started = False

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        if not self._has_started:
            self._has_started = True
            yield {"type": "message_start", "message": self._message(stream, [], None)}
        for _, delta in deltas:
            for found in self._reader.read(delta):
                yield from self._events(found)

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        answer.check_not_aborted(stream)
        yield from self._close()
        [one] = stream.requests[0].output().outputs
        ending = self._ending(one, called=self._reader.has_called)
        yield {"type": "message_delta", "delta": ending, "usage": self._usage(stream)}
        yield {"type": "message_stop"}

    def body(self, stream: Stream) -> dict[str, Any]:
        answer.check_not_aborted(stream)
        [one] = stream.requests[0].output().outputs
        read = self._turn.read(one)
        ending = self._ending(one, called=bool(read.calls))
        return self._message(stream, self._blocks(read), ending)

    def _message(
        self, stream: Stream, content: list[dict[str, Any]], ending: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "content": content,
            **(ending or {"stop_reason": None, "stop_sequence": None}),
            "usage": self._usage(stream),
        }

    def _ending(self, one: CompletionOutput, *, called: bool) -> dict[str, Any]:
        sequence: str | None = None
        reason = "tool_use" if called else "end_turn"
        if one.finish_reason == "length":
            is_full = len(one.token_ids) < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(one.stop_reason, str):
            reason, sequence = "stop_sequence", one.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, stream: Stream) -> dict[str, Any]:
        """Token counts. Anthropic's input_tokens exclude tokens read from the cache."""
        usage = answer.usage(stream)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }
        if self._turn.source.reasoning is not None:
            thinking = self._turn.num_reasoning_tokens(stream)
            counts["output_tokens_details"] = {"thinking_tokens": thinking}
        return counts

    def _blocks(self, read: Answer) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if read.reasoning and self._shows_reasoning:
            blocks.append({**_EMPTY["thinking"], "thinking": read.reasoning})
        if read.content:
            blocks.append({**_EMPTY["text"], "text": read.content})
        blocks += [_tool_use(call.id, call.name, _begun(call.arguments)) for call in read.calls]
        return blocks

    # ---- events ----

    def _events(self, found: Delta) -> Iterable[dict[str, Any]]:
        if found.reasoning and self._shows_reasoning:
            yield from self._begin("thinking")
            yield self._delta(type="thinking_delta", thinking=found.reasoning)
        if found.content:
            yield from self._begin("text")
            yield self._delta(type="text_delta", text=found.content)
        for call in found.calls:
            yield from self._of_call(call)

    def _of_call(self, call: CallDelta) -> Iterable[dict[str, Any]]:
        if call.name is not None:
            yield from self._close()
            yield from self._start("tool_use", _tool_use(call.id, call.name, {}))
        if call.arguments:
            yield self._delta(type="input_json_delta", partial_json=call.arguments)

    def _begin(self, kind: str) -> Iterable[dict[str, Any]]:
        """Open a block of this kind, unless one is already open."""
        if self._open != kind:
            yield from self._close()
            yield from self._start(kind, _EMPTY[kind])

    def _start(self, kind: str, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, **delta: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature="")
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}


_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


def _tool_use(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _begun(arguments: str) -> Any:
    """The arguments as an object. Of those that max_tokens cut, it has the complete ones, as the
    SDK's accumulated stream does."""
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:  # a Python literal that was cut
        return {}
