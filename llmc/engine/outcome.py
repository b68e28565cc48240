"""What a drawn token means for its request: the stop rules, and the news that goes to the front."""

from __future__ import annotations

from llmc.engine.grammar import follow
from llmc.engine.messages import RequestUpdate
from llmc.engine.plan import TokenLogprobs
from llmc.engine.request import Request

NOT_FINITE = (
    "the model's logits for this request were not finite (NaN or infinity), so no token could be "
    "drawn; the weights, the number format or a logits processor may be at fault"
)


def take_token(request: Request, token: int, logprob: TokenLogprobs | None) -> RequestUpdate:
    """Append a token. The update's `finish_reason` is set when it was the last."""
    problem = follow(request, token) if request.matcher is not None else None
    if problem is not None:
        return failed(request, problem)
    request.token_ids.append(token)
    update = RequestUpdate(
        request_id=request.request_id,
        new_token_ids=(token,),
        logprobs=() if logprob is None else (logprob,),
        num_cached_tokens=request.num_cached_tokens,
        queue_s=request.queue_s,
    )
    num_tokens = len(request.token_ids)
    if request.scores and num_tokens == request.num_prompt_tokens + 1:
        update.prompt_logprobs = [score for score in request.scores if score is not None]
    if (
        token in request.stop_token_ids
        and num_tokens - request.num_prompt_tokens > request.sampling.min_tokens
    ):
        update.finish_reason = "stop"
        update.stop_reason = None if token in request.eos_token_ids else token
    elif request.matcher is not None and request.matcher.is_complete:
        update.finish_reason, update.is_whole = "stop", True
    elif num_tokens >= request.max_total_tokens:
        update.finish_reason = "length"
    return update


def not_drawn(request: Request) -> str:
    """Why a step drew no token for a request."""
    if request.matcher is None:
        return NOT_FINITE
    return (
        "no token was left to draw: what structured_outputs allows next is banned by bad_words, "
        "logit_bias, min_tokens or stop_token_ids, or the model's logits were not finite"
    )


def aborted(request: Request) -> RequestUpdate:
    return RequestUpdate(
        request_id=request.request_id,
        finish_reason="abort",
        num_cached_tokens=request.num_cached_tokens,
    )


def failed(request: Request, error: str) -> RequestUpdate:
    return RequestUpdate(
        request_id=request.request_id,
        finish_reason="error",
        num_cached_tokens=request.num_cached_tokens,
        error=error,
    )
