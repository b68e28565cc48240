"""Response parts shared by chat and plain completions: head, usage, token spelling."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from llmc.async_llm import Stream
from llmc.frontend.completion import PositionLogprobs
from llmc.frontend.outputs import ActiveRequest
from llmc.outputs import Logprob
from llmc.server.errors import CALL_ABORTED, ApiError
from llmc.text.tokenizer import Tokenizer

ABORTED = "the server's operator aborted this call"
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


class AnswerHead:
    """id, creation time and model: the same in every chunk of a response."""

    def __init__(self, prefix: str, kind: str, model: str, name: str | None = None) -> None:
        """`name`: the client's own, for the id."""
        self._fields = {
            "id": f"{prefix}-{name or uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def __call__(self, **rest: Any) -> dict[str, Any]:
        return {**self._fields, **rest}


def usage(stream: Stream) -> dict[str, Any]:
    """Token counts so far. A prompt with n > 1 is counted once."""
    prompt = sum(len(request.source.prompt_token_ids) for request in stream.requests)
    completion = sum(request.num_output_tokens for request in stream.requests)
    cached = sum(request.num_cached_tokens for request in stream.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check_not_aborted(stream: Stream) -> None:
    """For protocols in which an abort is no reason for an end: there it is an error."""
    if any(one.finish_reason == "abort" for r in stream.requests for one in r.completions):
        raise ApiError(500, ABORTED, code=CALL_ABORTED)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def spelling(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text, or as `bytes:\\xe2\\x80` if it is only part of a character. Without a
    tokenizer, as `token_id:123`."""
    if tokenizer is None:
        return f"token_id:{token}"
    text = tokenizer.token_text(token)
    raw = tokenizer.token_bytes(token) if "\ufffd" in text else None
    return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_bytes(tokenizer: Tokenizer | None, token: int) -> list[int] | None:
    raw = tokenizer.token_bytes(token) if tokenizer is not None else None
    return None if raw is None else list(raw)


def prompt_logprobs(request: ActiveRequest, count: int) -> list[dict[str, Any] | None]:
    """Per prompt token: its logprob and those of the `count` likeliest, by id; None first."""
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for place, (token, one) in enumerate(position.items())
            if place == 0 or (one.rank or 0) <= count
        }
        for position in request.prompt_logprobs or ()
    ]


def logprobs(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    count: int,
    *,
    as_ids: bool = False,
) -> list[dict[str, Any]]:
    """Per token: its log-probability and those of the `count` likeliest, as in chat answers.

    `as_ids`: tokens are written as `token_id:123`.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling(None if as_ids else tokenizer, token),
            "logprob": finite(logprob),
            "bytes": token_bytes(tokenizer, token),
        }

    return [
        {
            **entry(token, position[token].logprob),
            "top_logprobs": [entry(other, one.logprob) for other, one in top(position, count)],
        }
        for token, position in zip(token_ids, positions, strict=True)
    ]


def top(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens of a position."""
    ranked = sorted(position.items(), key=lambda item: (item[1].rank or 0, -item[1].logprob))
    return ranked[:count]
