"""Admission: every refusal names the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmc.engine.admission import (
    Limits,
    admit,
    check_cache_salt,
    check_prompt,
    check_request,
    derive_seed,
    most_prompt_tokens,
)
from llmc.engine.messages import AddRequest
from llmc.engine.request import Request
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams

LIMITS = Limits(
    vocab_size=100,
    max_model_len=32,
    num_blocks=16,
    block_size=4,
    pool_tokens=64,
    eos_token_ids=frozenset({0, 1}),
)
SMALL_POOL = Limits(
    vocab_size=100,
    max_model_len=32,
    num_blocks=5,
    block_size=4,
    pool_tokens=20,
    eos_token_ids=frozenset(),
)


def ask(
    prompt: Sequence[int], sampling: SamplingParams | None = None, limits: Limits = LIMITS
) -> Request:
    message = AddRequest(
        request_id="a", prompt_token_ids=prompt, sampling=sampling or SamplingParams()
    )
    check_request(message.prompt_token_ids, message.sampling, limits)
    return admit(message, limits, default_seed=77)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5, -1], "prompt token 1 is -1; the model's token ids are 0 to 99"),
        ([5, 6, 100], "prompt token 2 is 100; the model's token ids are 0 to 99"),
        ([5, 2**31], "prompt token 1 is 2147483648"),
        ([5, True], "prompt token 1 is True; token ids must be integers"),
        ([5.0], "prompt token 0 is 5.0; token ids must be integers"),
    ],
)
def test_bad_prompts(prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ask(prompt)
    assert caught.value.param == "prompt"


def test_prompt_tokens_up_to_the_edge_pass() -> None:
    check_prompt([0, 99], 100)
    assert ask([0, 99]).token_ids == [0, 99]


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=[3, 100])),
        ("logit_bias", SamplingParams(logit_bias={100: 1.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=[5, 100])),
    ],
)
def test_token_ids_of_parameters_outside_the_vocabulary(
    param: str, sampling: SamplingParams
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{param} has token id 100") as caught:
        ask([5], sampling)
    assert caught.value.param == param


def test_allowing_only_stop_tokens_contradicts_min_tokens() -> None:
    only_stop = SamplingParams(allowed_token_ids=[0, 7], stop_token_ids=[7], min_tokens=1)
    with pytest.raises(InvalidRequestError, match="min_tokens=1 bans those") as caught:
        ask([5], only_stop)
    assert caught.value.param == "allowed_token_ids"
    ask([5], SamplingParams(allowed_token_ids=[0, 7], stop_token_ids=[7]))
    ask([5], SamplingParams(allowed_token_ids=[0, 8], stop_token_ids=[7], min_tokens=1))
    ask([5], SamplingParams(allowed_token_ids=[0], min_tokens=1, ignore_eos=True))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limits", "param", "code", "numbers"),
    [
        (32, None, LIMITS, "prompt", "context_length_exceeded", "32 tokens.*at most 31"),
        (33, 0, LIMITS, "prompt", "context_length_exceeded", "32 tokens.*has 33 tokens"),
        (20, 0, SMALL_POOL, "prompt", "kv_capacity_exceeded", "20 tokens.*holds 20"),
        (40, 1, LIMITS, "prompt", "context_length_exceeded", "40 tokens.*at most 31"),
        (30, 3, LIMITS, "max_tokens", "context_length_exceeded", "32 tokens.*make 33.*at most 2"),
        (20, 1, SMALL_POOL, "prompt", "kv_capacity_exceeded", "20 tokens.*holds 20.*5 blocks of 4"),
        (18, 3, SMALL_POOL, "max_tokens", "kv_capacity_exceeded", "make 21.*holds 20.*at most 2"),
    ],
)
def test_lengths_that_can_never_fit(
    num_prompt: int, max_tokens: int | None, limits: Limits, param: str, code: str, numbers: str
) -> None:
    with pytest.raises(InvalidRequestError, match=numbers) as caught:
        ask([5] * num_prompt, SamplingParams(max_tokens=max_tokens), limits)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limits", "total"),
    [
        (31, None, LIMITS, 32),
        (30, 2, LIMITS, 32),
        (5, 2, LIMITS, 7),
        (32, 0, LIMITS, 32),
        (19, None, SMALL_POOL, 20),
        (18, 2, SMALL_POOL, 20),
    ],
)
def test_how_long_a_request_may_grow(
    num_prompt: int, max_tokens: int | None, limits: Limits, total: int
) -> None:
    got = ask([5] * num_prompt, SamplingParams(max_tokens=max_tokens), limits)
    assert got.max_total_tokens == total


def test_what_ends_a_request() -> None:
    request = ask([5], SamplingParams(stop_token_ids=[7]))
    assert (request.eos_token_ids, request.stop_token_ids) == ({0, 1}, {0, 1, 7})
    request = ask([5], SamplingParams(stop_token_ids=[7], ignore_eos=True))
    assert (request.eos_token_ids, request.stop_token_ids) == (set(), {7})


@pytest.mark.parametrize("salt", ["", "x" * 257, "\ud800", 7])
def test_odd_salts_are_refused(salt: object) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt must be text of 1 to 256") as caught:
        check_cache_salt(salt)
    assert caught.value.param == "cache_salt"


def test_seeds() -> None:
    assert ask([5]).seed == 77
    assert ask([5], SamplingParams(seed=-3)).seed == -3
    assert ask([5], SamplingParams(seed=-1)).seed == 77, "none, for clients of other engines"
    assert ask([5], SamplingParams(seed=0)).seed == 0
    seeds = {derive_seed(engine_seed, count) for engine_seed in range(20) for count in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, 4) == derive_seed(3, 4)


@pytest.mark.parametrize("limits", [LIMITS, SMALL_POOL])
@pytest.mark.parametrize("max_tokens", [0, 1, 7, None])
def test_as_many_prompt_tokens_are_kept_as_fit(limits: Limits, max_tokens: int | None) -> None:
    sampling = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
    most = most_prompt_tokens(sampling, limits)
    assert most is not None
    ask([5] * most, sampling, limits)
    with pytest.raises(InvalidRequestError):
        ask([5] * (most + 1), sampling, limits)
    assert most_prompt_tokens(SamplingParams(truncate_prompt_tokens=3), limits) == 3
    assert most_prompt_tokens(SamplingParams(), limits) is None
