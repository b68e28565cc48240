"""/api/chat, /api/generate, /api/embed, /api/tags, /api/ps, /api/show, /api/version: Ollama's API.

Streams are lines of JSON, and times are nanoseconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM, Stream
from llmc.frontend.completion import PositionLogprobs
from llmc.frontend.inputs import Input, Prompt
from llmc.frontend.pooling import check_params
from llmc.model_info import ModelInfo
from llmc.pooling import PoolingParams, embedding, values_of
from llmc.server import answer
from llmc.server.adapters import adapter_named
from llmc.server.body import read_body
from llmc.server.errors import dump_json, json_response, ollama_error
from llmc.server.models import all_names, model_name
from llmc.server.ollama_protocol import (
    NAMES,
    EmbedBody,
    GenerateBody,
    OldEmbedBody,
    OllamaBody,
    OllamaChatBody,
    ShowBody,
)
from llmc.server.pooling import PooledCall
from llmc.server.protocol import ChatBody
from llmc.server.respond import Deltas, GenerationResponse, Wire, preparing
from llmc.server.sampling import cache_salt, sampling_params
from llmc.server.structured import grammar_field, grammar_from
from llmc.server.turn import Turn, prepare_turn, renamed_params
from llmc.text.chat import reasoning_format, tool_format
from llmc.text.infill import has_infill_tokens
from llmc.text.tools.arguments import decoded
from llmc.text.tools.parse import Delta


def _line(value: dict[str, Any]) -> bytes:
    return dump_json(value) + b"\n"


# Clients refuse servers whose version is below the one they need; VS Code needs 0.6.4, for example.
# This is the first with all of the APIs that this server has (/v1/messages was the last).
API_VERSION = "0.14.0"

WIRE = Wire(
    event=_line,
    error=ollama_error,
    media_type=b"application/x-ndjson",
    keep_alive=b"",  # a line that is not JSON would break clients
)


async def chat(request: Request) -> GenerationResponse | Response:
    body = await read_body(request, OllamaChatBody)
    if not body.messages:
        return _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    with renamed_params(NAMES):
        turn = await prepare_turn(request, body.chat())
    return turn.respond(request, OllamaCall(turn, body))


async def generate(request: Request) -> GenerationResponse | Response:
    body = await read_body(request, GenerateBody)
    if not (body.prompt or body.suffix or body.images):
        return _loaded(request, body, {"response": ""})
    with renamed_params(NAMES):
        if body.suffix:
            turn = await _infill_turn(request, body.chat(), body.suffix)
        else:
            turn = await (_raw_turn if body.raw else prepare_turn)(request, body.chat())
    return turn.respond(request, OllamaCall(turn, body))


async def embed(request: Request) -> GenerationResponse | Response:
    body = await read_body(request, EmbedBody)
    head = {"model": model_name(request, body.model and body.model.removesuffix(":latest"))}
    began = time.monotonic_ns()

    def made(vectors: list[list[float]], num_tokens: int) -> dict[str, Any]:
        times = {"total_duration": time.monotonic_ns() - began, "load_duration": 0}
        return {**head, "embeddings": vectors, **times, "prompt_eval_count": num_tokens}

    params = PoolingParams(
        dimensions=body.dimensions, truncate_prompt_tokens=-1 if body.truncate else None
    )
    return await _embedded(request, body.texts, params, made)


async def embeddings(request: Request) -> GenerationResponse | Response:
    """Ollama's older embedding call, for one text."""
    body = await read_body(request, OldEmbedBody)
    model_name(request, body.model and body.model.removesuffix(":latest"))

    def made(vectors: list[list[float]], num_tokens: int) -> dict[str, Any]:
        return {"embedding": vectors[0] if vectors else []}

    params = PoolingParams(truncate_prompt_tokens=-1)
    return await _embedded(request, [body.prompt] * bool(body.prompt), params, made)


async def _embedded(
    request: Request,
    texts: list[str],
    params: PoolingParams,
    made: Callable[[list[list[float]], int], dict[str, Any]],
) -> GenerationResponse | Response:
    """Embed the texts. With no texts nothing is computed: clients use that to load a model."""
    state = request.app.state
    llm: AsyncLLM = state.llm
    info = llm.inputs.need_pooling("embed")
    check_params(params, info)
    if not texts:
        return json_response(made([], 0))
    with preparing(request), renamed_params({"prompt": "input"}):
        sources = await llm.prepare.pooled(texts, truncate=params.truncate_prompt_tokens)

    def body(stream: Stream) -> dict[str, Any]:
        vectors = [list(embedding(values_of(one.vector), info, params)) for one in stream.requests]
        return made(vectors, answer.usage(stream)["prompt_tokens"])

    owner = cache_salt(request, None)
    call = PooledCall([source.salted(owner) for source in sources], body)
    return GenerationResponse(llm, call, state.settings, state.metrics)


async def tags(request: Request) -> Response:
    state = request.app.state
    cards = [card(name, state.created, state.llm.info) for name in all_names(state)]
    return json_response({"models": cards})


async def ps(request: Request) -> Response:
    state = request.app.state
    cards = [running_card(name, state.created, state.llm.info) for name in all_names(state)]
    return json_response({"models": [] if state.sleeper.level else cards})


async def show(request: Request) -> Response:
    body = await read_body(request, ShowBody)
    wanted = body.model or body.name
    name = model_name(request, wanted and wanted.removesuffix(":latest"))
    llm: AsyncLLM = request.app.state.llm
    tokenizer = llm.tokenizer
    shown = card(name, request.app.state.created, llm.info)
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": (tokenizer.chat_template if tokenizer is not None else None) or "",
            "details": shown["details"],
            "model_info": {
                "general.architecture": "llmc",
                "llmc.context_length": llm.info.max_model_len,
            },
            "capabilities": _capabilities(llm),
            "modified_at": shown["modified_at"],
        }
    )


def _capabilities(llm: AsyncLLM) -> list[str]:
    """The model's capabilities in Ollama's terms, which have none for a classifier."""
    if llm.info.pooling is not None:
        return ["embedding"] if llm.info.pooling.task == "embed" else []
    tokenizer = llm.tokenizer
    found = {"completion": True, "vision": llm.info.images is not None}
    if tokenizer is not None:
        found["insert"] = has_infill_tokens(tokenizer)
        found["tools"] = tool_format(tokenizer) is not None
        found["thinking"] = reasoning_format(tokenizer) is not None
    return [name for name, is_there in found.items() if is_there]


async def version(request: Request) -> Response:
    return json_response({"version": API_VERSION})


async def _raw_turn(request: Request, body: ChatBody) -> Turn:
    """A turn from the verbatim prompt, without a chat template."""
    return await _plain_turn(request, body, body.messages[-1]["content"])


async def _plain_turn(request: Request, body: ChatBody, prompt: Prompt) -> Turn:
    llm: AsyncLLM = request.app.state.llm
    model = model_name(request, body.model)
    sampling = sampling_params(
        body, llm.inputs, max_tokens=body.max_tokens, logprobs=body.num_logprobs
    )
    with preparing(request), grammar_from(grammar_field(body)):
        source = await llm.prepare.prompt(prompt, sampling)
    source = source.salted(cache_salt(request, body)).with_adapter(adapter_named(request, model))
    return Turn(llm=llm, model=model, source=source)


async def _infill_turn(request: Request, body: ChatBody, suffix: str) -> Turn:
    """A turn that fills in between the prompt and the suffix, with the model's special tokens."""
    llm: AsyncLLM = request.app.state.llm
    llm.inputs.need_generation()
    with preparing(request):
        (prompt,), ends = await llm.prepare.infill([body.messages[-1]["content"]], suffix)
    body.stop_token_ids = sorted(ends)
    return await _plain_turn(request, body, prompt)


def _loaded(request: Request, body: OllamaBody, said: dict[str, Any]) -> Response:
    """The response to a call without a prompt, which clients use to load a model."""
    name = model_name(request, body.model and body.model.removesuffix(":latest"))
    head = {"model": name, "created_at": _now(), **said}
    line = {**head, "done": True, "done_reason": "load"}
    if not body.stream:
        return json_response(line)
    return Response(_line(line), media_type=WIRE.media_type.decode())


def card(name: str, created: int, info: ModelInfo | None) -> dict[str, Any]:
    """Ollama's description of a model. `info` is None until the model is loaded."""
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "size": 0 if info is None else info.weight_bytes,
        # Of no file: clients tell models apart by it, and print its first 12 digits.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "" if info is None else info.dtype,
        },
    }


def running_card(name: str, created: int, info: ModelInfo) -> dict[str, Any]:
    """Ollama's description of a loaded model."""
    return {
        **card(name, created, info),
        "expires_at": "9999-12-31T23:59:59Z",  # no time after which it would be unloaded
        "size_vram": 0 if info.device == "cpu" else info.weight_bytes,
        "context_length": info.max_model_len,
    }


class OllamaCall:
    """Builds the response to one call: a line per piece, and a last line with the timings."""

    wire = WIRE

    def __init__(self, turn: Turn, body: OllamaBody) -> None:
        self.sources: Sequence[Input] = [turn.source]
        self.stream = body.stream
        self._turn = turn
        self._reader = turn.reader()
        self._calls: list[dict[str, Any]] = []  # the last one may be incomplete
        self._shows_reasoning = body.shows_reasoning
        self._is_chat = isinstance(body, OllamaChatBody)
        self._top = (body.top_logprobs or 0) if body.logprobs else None

    def chunks(self, stream: Stream, deltas: Deltas) -> Iterable[dict[str, Any]]:
        for _, delta in deltas:
            lines = [one for found in self._reader.read(delta) for one in self._lines(found)]
            scored = self._logprobs(delta.token_ids, delta.logprobs)
            if scored:
                lines = lines or [self._said()]
                lines[0] |= scored
            yield from lines

    def last_chunks(self, stream: Stream) -> Iterable[dict[str, Any]]:
        answer.check_not_aborted(stream)
        yield from self._complete_calls()
        yield {**self._said(), **self._end(stream)}

    def body(self, stream: Stream) -> dict[str, Any]:
        answer.check_not_aborted(stream)
        [one] = stream.requests[0].output().outputs
        read = self._turn.read(one)
        calls = [_call(call.name, decoded(call.arguments)) for call in read.calls if call.is_whole]
        said = self._said(read.content, thinking=read.reasoning, tool_calls=calls)
        scored = self._logprobs(one.token_ids, one.logprobs or ())
        return {**said, **scored, **self._end(stream)}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]
    ) -> dict[str, Any]:
        """The field of a line; none without tokens."""
        if self._top is None or not token_ids:
            return {}
        tokenizer = self._turn.llm.tokenizer
        return {"logprobs": answer.logprobs(tokenizer, token_ids, logprobs, self._top)}

    def _lines(self, found: Delta) -> Iterable[dict[str, Any]]:
        if found.reasoning and self._shows_reasoning:
            yield self._said(thinking=found.reasoning)
        if found.content:
            yield self._said(found.content)
        for call in found.calls:  # sent only when complete
            if call.name is not None:
                yield from self._complete_calls()
                self._calls.append({"name": call.name, "arguments": ""})
            self._calls[-1]["arguments"] += call.arguments

    def _complete_calls(self) -> Iterable[dict[str, Any]]:
        while self._calls:
            call = self._calls.pop(0)
            arguments = decoded(call["arguments"])
            if isinstance(arguments, dict):  # not cut by num_predict
                yield self._said(tool_calls=[_call(call["name"], arguments)])

    def _said(
        self, content: str = "", *, thinking: str = "", tool_calls: Sequence[Any] = ()
    ) -> dict[str, Any]:
        extra = {"thinking": thinking} if thinking and self._shows_reasoning else {}
        head = {"model": self._turn.model, "created_at": _now()}
        if not self._is_chat:
            return {**head, "response": content, **extra, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content, **extra}
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        return {**head, "message": message, "done": False}

    def _end(self, stream: Stream) -> dict[str, Any]:
        [request] = stream.requests
        [one] = request.output().outputs
        usage = answer.usage(stream)
        now = time.monotonic()
        first = request.first_token or now
        return {
            "done": True,
            "done_reason": "length" if one.finish_reason == "length" else "stop",
            "total_duration": _ns(now - request.submitted),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _ns(first - request.submitted),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _ns(now - first),
        }


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
