"""OpenAI's Responses API: POST /v1/responses and /v1/responses/input_tokens, GET and DELETE
/v1/responses/{name}, GET /v1/responses/{name}/input_items."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import Stream
from llmc.frontend.completion import CompletionDelta
from llmc.frontend.inputs import Input
from llmc.outputs import CompletionOutput
from llmc.server import answer
from llmc.server.body import read_body
from llmc.server.errors import ApiError, error_body, json_response
from llmc.server.list_page import list_page
from llmc.server.respond import Deltas, GenerationResponse, Wire, named_event
from llmc.server.responses_protocol import NAMES, ResponsesBody
from llmc.server.responses_store import ResponseStore, StoredResponse
from llmc.server.turn import Answer, Turn, prepare_turn, renamed_params
from llmc.text.tools.parse import CallDelta, Delta


async def create_response(request: Request) -> GenerationResponse:
    body = await _read(request)
    previous = _previous(request, body)
    before = previous.messages if previous is not None else ()
    with renamed_params(NAMES):
        turn = await prepare_turn(request, body.chat(before))
    call = ResponseCall(turn, body)
    if body.store and request.app.state.settings.api_workers == 1:
        messages = [*before, *body.messages()]
        items: list[Mapping[str, Any]] = [*body.items()]
        if previous is not None:
            items = [*previous.items, *previous.response["output"], *items]
        caller = _caller(request)
        call.keep = lambda response, said: _store(request).put(
            response, [*messages, said], caller, items
        )
    return turn.respond(request, call)


async def count_input_tokens(request: Request) -> Response:
    body = await _read(request)
    with renamed_params(NAMES):
        previous = _previous(request, body)
        before = previous.messages if previous is not None else ()
        turn = await prepare_turn(request, body.chat(before), submits=False)
    count = len(turn.source.prompt_token_ids)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def get_response(request: Request) -> Response:
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "a stored response is not streamed; leave out stream", param="stream")
    found = _store(request).get(request.path_params["name"], _caller(request))
    return json_response(found.response)


async def list_input_items(request: Request) -> Response:
    """The items that a stored response was made from, those of the responses before it included."""
    found = _store(request).get(request.path_params["name"], _caller(request))
    newest_first = [dict(item) for item in reversed(found.items)]
    return json_response(list_page(request, newest_first, most=100, default=20))


async def delete_response(request: Request) -> Response:
    name = request.path_params["name"]
    _store(request).delete(name, _caller(request))
    return json_response({"id": name, "object": "response", "deleted": True})


async def _read(request: Request) -> ResponsesBody:
    """The body, with the stored items in place of references to them."""
    body = await read_body(request, ResponsesBody)
    if isinstance(body.input, list):
        for index, item in enumerate(body.input):
            if item.get("type") == "item_reference":
                param = f"input[{index}]"
                store = _store(request, param=param)
                found = store.item(item.get("id"), _caller(request), param=param)
                body.input[index] = dict(found)
    return body


def _previous(request: Request, body: ResponsesBody) -> StoredResponse | None:
    """The response that this one continues."""
    name = body.previous_response_id
    if name is None:
        return None
    param = "previous_response_id"
    return _store(request, param=param).get(name, _caller(request), param=param)


def _store(request: Request, param: str | None = None) -> ResponseStore:
    if request.app.state.settings.api_workers > 1:
        raise ApiError(
            400,
            "responses are not stored by a server with --api-workers, because its processes share "
            "no memory; send the whole conversation as input",
            param=param,
            code="unsupported_parameter",
        )
    store: ResponseStore = request.app.state.responses
    return store


def _caller(request: Request) -> str:
    return str(getattr(request.state, "caller", ""))


class ResponseCall:
    """Builds one response: items of reasoning, text and calls, in the order generated."""

    def __init__(self, turn: Turn, body: ResponsesBody) -> None:
        self.sources: Sequence[Input] = [turn.source]
        self.stream = body.stream
        self.wire = Wire(event=named_event, error=self._error)
        self.keep: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        self._turn = turn
        self._body = body
        self._reader = turn.reader()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item
        self._said: list[str] = []  # of it
        self._logprobs: list[dict[str, Any]] = []  # of the tokens that no event has carried yet
        self._said_logprobs: list[dict[str, Any]] = []  # of the last item

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        if not self._num_events:
            started = self._response("in_progress", [])
            yield self._event("response.created", response=started)
            yield self._event("response.in_progress", response=started)
        for _, delta in deltas:
            self._logprobs += self._logprobs_of(delta)
            for found in self._reader.read(delta):
                yield from self._events(found)

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        [one] = stream.requests[0].output().outputs
        yield from self._close(_item_status(one))
        response = self._ended(stream, self._items)
        yield self._event(f"response.{response['status']}", response=response)

    def body(self, stream: Stream) -> dict[str, Any]:
        [one] = stream.requests[0].output().outputs
        items = _items(self._turn.read(one))
        for item in items:
            if item["type"] == "message":
                item["content"][0]["logprobs"] = self._logprobs_of(one)
        if items:  # only the last one can be cut
            items[-1]["status"] = _item_status(one)
        return self._ended(stream, items)

    def _ended(self, stream: Stream, items: list[dict[str, Any]]) -> dict[str, Any]:
        [one] = stream.requests[0].output().outputs
        response = self._response(_status(one), items)
        if one.finish_reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif one.finish_reason == "abort":
            response["error"] = {"code": "server_error", "message": answer.ABORTED}
        usage = answer.usage(stream)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._turn.num_reasoning_tokens(stream)},
            "total_tokens": usage["total_tokens"],
        }
        if self.keep is not None:
            self.keep(response, _as_message(self._turn.read(one)))
        return response

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        body, sampling = self._body, self._turn.source.sampling
        form = body.text.format if body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._turn.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self.keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": _shown(form) if form is not None else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    # ---- events ----

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _error(self, error: ApiError) -> dict[str, Any]:
        shown = error_body(error)["error"]
        return self._event(
            "error", code=shown["code"], message=shown["message"], param=shown["param"]
        )

    def _events(self, found: Delta) -> Iterable[dict[str, Any]]:
        for kind, text in (("reasoning", found.reasoning), ("message", found.content)):
            if text:
                yield from self._text(kind, text)
        for call in found.calls:
            yield from self._of_call(call)

    def _text(self, kind: str, text: str) -> Iterable[dict[str, Any]]:
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._start({**_text_item(kind, ""), "content": []})
            part = _text_item(kind, "")["content"][0]
            yield self._of_item("response.content_part.added", content_index=0, part=part)
        self._said.append(text)
        extra = self._take_logprobs() if kind == "message" else {}
        yield self._of_item(f"{_NAMES[kind]}.delta", content_index=0, delta=text, **extra)

    def _of_call(self, call: CallDelta) -> Iterable[dict[str, Any]]:
        if call.name is not None:
            yield from self._close()
            yield from self._start(_call_item(call.id, call.name, ""))
        if call.arguments:
            self._said.append(call.arguments)
            yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _take_logprobs(self) -> dict[str, Any]:
        """The field of the next event that carries log-probabilities."""
        taken, self._logprobs = self._logprobs, []
        self._said_logprobs += taken
        return {"logprobs": taken}

    def _logprobs_of(self, one: CompletionOutput | CompletionDelta) -> list[dict[str, Any]]:
        count = self._body.num_logprobs
        if count is None:
            return []
        tokenizer = self._turn.llm.tokenizer
        return answer.logprobs(tokenizer, one.token_ids, one.logprobs or (), count)

    def _start(self, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
        self._open, self._said, self._said_logprobs = True, [], []
        self._items.append({**item, "status": "in_progress"})
        place = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=place, item=self._items[-1])

    def _close(self, status: str = "completed") -> Iterable[dict[str, Any]]:
        if not self._open:
            return
        self._open = False
        item, text = self._items[-1], "".join(self._said)
        if item["type"] == "function_call":
            done = {**item, "arguments": text, "status": status}
            name = {"arguments": text, "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **name)
        else:
            done = {**_text_item(item["type"], text), "id": item["id"], "status": status}
            part, extra = done["content"][0], {}
            if item["type"] == "message":
                self._take_logprobs()
                part["logprobs"] = extra["logprobs"] = self._said_logprobs
            kind = f"{_NAMES[item['type']]}.done"
            yield self._of_item(kind, content_index=0, text=text, **extra)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        self._items[-1] = done
        place = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=place, item=done)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=place, **fields)


_NAMES = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def _status(one: CompletionOutput) -> str:
    """OpenAI's status for how an answer ended; "incomplete" can't give an abort as its reason."""
    return {"length": "incomplete", "abort": "failed"}.get(one.finish_reason or "", "completed")


def _item_status(one: CompletionOutput) -> str:
    return "completed" if _status(one) == "completed" else "incomplete"


def _items(read: Answer) -> list[dict[str, Any]]:
    items = [_text_item("reasoning", read.reasoning)] if read.reasoning else []
    if read.content:
        items.append(_text_item("message", read.content))
    return items + [_call_item(call.id, call.name, call.arguments) for call in read.calls]


def _text_item(kind: str, text: str) -> dict[str, Any]:
    item = {"type": kind, "status": "completed"}
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{uuid.uuid4().hex}", **item, "summary": [], "content": [part]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": f"msg_{uuid.uuid4().hex}", **item, "role": "assistant", "content": [part]}


def _call_item(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _as_message(read: Answer) -> dict[str, Any]:
    """The answer as a chat message, from which the conversation can continue."""
    message: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.reasoning:
        message["reasoning_content"] = read.reasoning
    calls = [call.fields() for call in read.calls if call.is_whole]
    if calls:
        message["tool_calls"] = calls
    return message


def _shown(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True)
