"""/tokenize, /detokenize, /tokenizer_info: the model's tokenizer over HTTP."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.async_llm import AsyncLLM
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams
from llmc.server.body import read_body
from llmc.server.errors import json_response
from llmc.server.models import model_name
from llmc.server.protocol import DetokenizeBody, TokenizeBody
from llmc.server.respond import preparing
from llmc.server.tools import template_tools
from llmc.server.turn import prepare_messages

ONE_TOKEN = SamplingParams(max_tokens=1)


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeBody)
    model_name(request, body.model)
    llm: AsyncLLM = request.app.state.llm
    tokenizer = llm.inputs.need_tokenizer("prompt")
    if body.content is not None:
        return await _content_tokens(request, body, body.content)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    with preparing(request, submits=False):
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await llm.prepare.encode(body.prompt, add_special_tokens=special)
        else:
            extra = body.chat_template_kwargs or {}
            tools = template_tools(body.tools)
            source = await prepare_messages(llm, body, ONE_TOKEN, extra, tools)
            tokens = source.prompt_token_ids
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": llm.info.max_model_len,
        "tokens": tokens,
        "token_strs": tokenizer.tokens(tokens) if body.return_token_strs else None,
    }
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeBody)
    model_name(request, body.model)
    llm: AsyncLLM = request.app.state.llm
    with preparing(request, submits=False):
        text = await llm.prepare.decode(body.tokens)
    return json_response({"prompt": text, "content": text})  # either name has its clients


async def _content_tokens(request: Request, body: TokenizeBody, text: str) -> Response:
    """The answer in the format of ggml's server."""
    llm: AsyncLLM = request.app.state.llm
    tokenizer = llm.inputs.need_tokenizer("content")
    with preparing(request, submits=False):
        tokens = await llm.prepare.encode(text, add_special_tokens=body.add_special)
    if not body.with_pieces:
        return json_response({"tokens": tokens})

    def piece(token: int) -> str | list[int]:
        """As text, or as bytes if it is only part of a character."""
        shown = tokenizer.token_text(token)
        raw = tokenizer.token_bytes(token) if "\ufffd" in shown else None
        return shown if raw is None else list(raw)

    return json_response({"tokens": [{"id": token, "piece": piece(token)} for token in tokens]})


async def tokenizer_info(request: Request) -> Response:
    """What an evaluation harness needs to use this tokenizer over HTTP."""
    llm: AsyncLLM = request.app.state.llm
    tokenizer = llm.inputs.need_tokenizer("tokenizer_info")
    hf = tokenizer.hf
    return json_response(
        {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": tokenizer.size,
            "model_max_length": llm.info.max_model_len,
            "bos_token": hf.bos_token,
            "eos_token": hf.eos_token,
            "pad_token": hf.pad_token,
            "unk_token": hf.unk_token,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "chat_template": tokenizer.chat_template,
        }
    )
