"""Admission: validates requests and creates the engine's record of a valid one.

    frontend/inputs.py --check_request--> AddRequest --> EngineCore.add --admit--> Request

The checks run once, on the way in: token ids against the width of the model's logits, lengths
against the context and the block pool. A request that passes can always run to completion, so it
can neither hang the queue nor index out of range. `admit` only checks the length of its message
again, since an engine that was restarted may have less memory than the frontend knew of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmc.engine.messages import AddRequest
from llmc.engine.request import Request
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

MAX_CACHE_SALT = 256  # characters
# The wording that clients such as LangChain and LiteLLM match on.
_CONTEXT = "This model's maximum context length is {} tokens:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Capacity of the model and the pool. `vocab_size` is the width of the logits, `pool_tokens`
    the length of the longest sequence that fits into an otherwise empty pool."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    pool_tokens: int
    eos_token_ids: frozenset[int]


def check_request(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, limits: Limits
) -> None:
    """Raise InvalidRequestError, with the offending field in `param`, if it cannot be served.

    The salt is checked where it is set (`check_cache_salt`), which may happen later.
    """
    check_prompt(prompt_token_ids, limits.vocab_size)
    wanted = sampling.max_tokens
    if wanted is None and sampling.min_tokens:
        wanted = sampling.min_tokens
    _check_length(len(prompt_token_ids), wanted, limits)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_ids(name, getattr(sampling, name) or (), limits.vocab_size)
    for word in sampling.bad_words_token_ids or ():
        _check_ids("bad_words_token_ids", word, limits.vocab_size)
    _check_something_allowed(sampling, limits)


def most_prompt_tokens(sampling: SamplingParams, limits: Limits) -> int | None:
    """How many of the prompt's last tokens `truncate_prompt_tokens` keeps; None: all."""
    if sampling.truncate_prompt_tokens != -1:
        return sampling.truncate_prompt_tokens
    answer = sampling.max_tokens
    if answer is None:
        answer = max(1, sampling.min_tokens)
    # without an answer, the prompt may fill the context, but not the pool
    return max(1, min(limits.max_model_len - answer, limits.pool_tokens - max(1, answer)))


def check_pooled(prompt_token_ids: Sequence[int], limits: Limits) -> None:
    """`check_request` for a pooling request, whose prompt can fill the whole context."""
    check_prompt(prompt_token_ids, limits.vocab_size)
    num_prompt, context, pool = len(prompt_token_ids), limits.max_model_len, limits.pool_tokens
    if num_prompt > context:
        raise InvalidRequestError(
            f"{_CONTEXT.format(context)} the input has {num_prompt} tokens; shorten it, or let the "
            "server cut it with truncate_prompt_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    if num_prompt >= pool:
        raise InvalidRequestError(
            f"the input has {num_prompt} tokens, but the key-value cache holds {pool} "
            f"({limits.num_blocks} blocks of {limits.block_size}), one of which stays free; "
            "shorten it, or give the engine more cache memory",
            param="prompt",
            code="kv_capacity_exceeded",
        )


def admit(message: AddRequest, limits: Limits, default_seed: int) -> Request:
    """The engine's record of a request that has passed `check_request`. InvalidRequestError if it
    does not fit into this engine."""
    sampling = message.sampling
    num_prompt = len(message.prompt_token_ids)
    total = total_tokens(num_prompt, sampling.max_tokens, limits)
    # a prompt for pooling can fill the context, and has the token that its end draws
    if total > min(limits.pool_tokens, limits.max_model_len + 1):
        raise InvalidRequestError(
            f"the request can grow to {total} tokens, but this engine has a context of "
            f"{limits.max_model_len} and a key-value cache of {limits.pool_tokens} tokens; it may "
            "have been restarted with less memory: shorten the prompt or max_tokens",
            code="kv_capacity_exceeded",
        )
    eos = end_tokens(sampling, limits)
    return Request(
        request_id=message.request_id,
        token_ids=list(message.prompt_token_ids),
        num_prompt_tokens=num_prompt,
        sampling=sampling,
        seed=default_seed if sampling.seed is None else sampling.seed,
        max_total_tokens=total,
        eos_token_ids=eos,
        stop_token_ids=eos.union(sampling.stop_token_ids or ()),
        priority=message.priority,
        cache_salt=_prefix_key(message),
        adapter=message.adapter,
        images=message.images,
    )


def _prefix_key(message: AddRequest) -> bytes:
    """Whatever determines the cached keys and values besides tokens: the salt and the adapter."""
    salt = (message.cache_salt or "").encode()
    if message.adapter is None:
        return salt
    adapter = hashlib.blake2b(repr(message.adapter).encode(), digest_size=16).digest()
    return b"\xff" + adapter + salt  # salts are UTF-8, so none starts with that byte


def derive_seed(engine_seed: int, count: int) -> int:
    """A reproducible 63-bit seed for the `count`-th request, if it sets none itself."""
    digest = hashlib.blake2b(f"{engine_seed}/{count}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) == 0:
        raise InvalidRequestError(
            "the prompt is empty; it must have at least one token", param="prompt"
        )
    # Fast path without a Python loop: most prompts are valid.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for index, token in enumerate(token_ids):
        if type(token) is not int:  # isinstance would accept bool
            raise InvalidRequestError(
                f"prompt token {index} is {token!r}; token ids must be integers", param="prompt"
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"prompt token {index} is {token}; the model's token ids are 0 to {vocab_size - 1}",
                param="prompt",
            )


def check_cache_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT or not _is_text(salt):
        raise InvalidRequestError(
            f"cache_salt must be text of 1 to {MAX_CACHE_SALT} characters, got {salt!r:.80}",
            param="cache_salt",
        )


def _is_text(text: str) -> bool:
    """Whether it can be encoded. Lone surrogates, which JSON allows, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def end_tokens(sampling: SamplingParams, limits: Limits) -> frozenset[int]:
    """The model's end tokens, unless the request ignores them."""
    # A grammar allows an end token only where the output can end, and nothing can follow it.
    goes_on = sampling.ignore_eos and sampling.structured_outputs is None
    return frozenset() if goes_on else limits.eos_token_ids


def _check_something_allowed(sampling: SamplingParams, limits: Limits) -> None:
    """Stop tokens are banned before `min_tokens`, so some other token must be allowed."""
    allowed = sampling.allowed_token_ids
    stop = end_tokens(sampling, limits).union(sampling.stop_token_ids or ())
    if sampling.min_tokens > 0 and allowed is not None and stop.issuperset(allowed):
        raise InvalidRequestError(
            f"allowed_token_ids has only tokens that end the output, but min_tokens="
            f"{sampling.min_tokens} bans those at first; allow another token",
            param="allowed_token_ids",
        )


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{param} has token id {token}; the model's token ids are 0 to {vocab_size - 1}",
                param=param,
            )


def total_tokens(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """The length that the request can grow to, prompt included."""
    if max_tokens is None:
        return min(limits.max_model_len, limits.pool_tokens)
    return num_prompt + max_tokens


def _check_length(num_prompt: int, max_tokens: int | None, limits: Limits) -> None:
    context, pool = limits.max_model_len, limits.pool_tokens
    if max_tokens == 0 and num_prompt > context:
        raise InvalidRequestError(
            f"{_CONTEXT.format(context)} the prompt has {num_prompt} tokens; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if max_tokens != 0 and num_prompt >= context:
        raise InvalidRequestError(
            f"{_CONTEXT.format(context)} the prompt has {num_prompt} tokens, which leaves no room "
            f"for an answer; shorten it to at most {context - 1}",
            param="prompt",
            code="context_length_exceeded",
        )
    if num_prompt >= pool:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens, but the key-value cache holds {pool} "
            f"({limits.num_blocks} blocks of {limits.block_size}), answer included; "
            "shorten it, or give the engine more cache memory",
            param="prompt",
            code="kv_capacity_exceeded",
        )
    total = total_tokens(num_prompt, max_tokens, limits)
    if total > context:
        raise InvalidRequestError(
            f"{_CONTEXT.format(context)} {num_prompt} prompt tokens and max_tokens={max_tokens} "
            f"make {total}; ask for at most {context - num_prompt}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if total > pool:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} make {total}, but the "
            f"key-value cache holds {pool} ({limits.num_blocks} blocks of {limits.block_size}); "
            f"ask for at most {pool - num_prompt}, or give the engine more cache memory",
            param="max_tokens",
            code="kv_capacity_exceeded",
        )
