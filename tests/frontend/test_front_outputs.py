"""OutputProcessor: what the engine is asked for with n > 1 and best_of; its updates."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.engine.messages import AddRequest, RequestUpdate
from llmc.engine.plan import TokenLogprobs
from llmc.errors import InvalidRequestError
from llmc.frontend.completion import Cursor
from llmc.frontend.inputs import Input
from llmc.frontend.outputs import ActiveRequest, OutputProcessor
from llmc.outputs import FinishReason
from llmc.sampling_params import SamplingParams

PROMPT = [1, 2, 3]


def submit(
    sampling: SamplingParams, **fields: str
) -> tuple[OutputProcessor, ActiveRequest, list[AddRequest]]:
    outputs = OutputProcessor(None)
    source = Input(prompt=None, prompt_token_ids=PROMPT, sampling=sampling, **fields)
    return outputs, *outputs.add("r", source, 3)


def say(
    outputs: OutputProcessor,
    request_id: str,
    token: int,
    logprob: float | None,
    reason: FinishReason | None = None,
) -> None:
    item = () if logprob is None else (TokenLogprobs(token_id=token, logprob=logprob, rank=1),)
    outputs.apply(
        [
            RequestUpdate(
                request_id=request_id, new_token_ids=(token,), logprobs=item, finish_reason=reason
            )
        ]
    )


def test_one_sequence_is_one_message() -> None:
    sampling = SamplingParams(seed=5)
    _, _, messages = submit(sampling, cache_salt="mine")
    assert messages == [
        AddRequest(
            request_id="r-0",
            prompt_token_ids=PROMPT,
            sampling=sampling,
            priority=3,
            cache_salt="mine",
        )
    ]


@pytest.mark.parametrize("priority", [None, "high", 1.5, True, 2**63])
def test_a_priority_is_an_integer(priority: Any) -> None:
    """The engine could not sort its queue by anything else."""
    outputs, _, _ = submit(SamplingParams())
    source = Input(prompt=None, prompt_token_ids=PROMPT, sampling=SamplingParams())
    with pytest.raises(InvalidRequestError, match="priority must be a 64-bit integer, got"):
        outputs.add("other", source, priority)
    assert list(outputs.active) == ["r"] and outputs.num_sequences == 1
    outputs.add("other", source, -(2**63))


def test_siblings_name_the_first_of_them() -> None:
    _, _, messages = submit(SamplingParams(n=3, seed=5))
    assert [(m.request_id, m.fork_of, m.sampling.seed) for m in messages] == [
        ("r-0/0", None, 5),
        ("r-0/1", "r-0/0", 6),
        ("r-0/2", "r-0/0", 7),
    ]
    assert all(m.sampling.n == 1 and m.sampling.logprobs is None for m in messages)


@pytest.mark.parametrize("seed", [-(2**63), -(2**63) + 1, -100, -2, 0, 2**63 - 1])
def test_siblings_have_seeds_of_their_own(seed: int) -> None:
    _, _, messages = submit(SamplingParams(n=128, seed=seed))
    seeds = {m.sampling.seed for m in messages}
    assert len(seeds) == 128 and None not in seeds
    assert messages[0].sampling.seed == seed


@pytest.mark.parametrize("logprobs", [None, 2])
def test_best_of_shows_the_likeliest_at_the_end(logprobs: int | None) -> None:
    outputs, request, messages = submit(SamplingParams(n=2, best_of=4, logprobs=logprobs))
    assert {m.sampling.logprobs for m in messages} == {logprobs or 0}
    assert {(m.sampling.n, m.sampling.best_of) for m in messages} == {(1, None)}
    cursor = Cursor()
    for index, logprob in enumerate((-3.0, -1.0, -4.0, -2.0)):
        assert not request.finished and request.completions[0].delta(cursor) is None
        assert request.output().outputs[0].token_ids == []
        say(outputs, f"r-0/{index}", 10 + index, logprob)
        say(outputs, f"r-0/{index}", 20 + index, -0.5, "length")
    assert request.finished and not outputs.active and outputs.num_sequences == 0
    shown = request.output().outputs
    assert [(c.index, c.token_ids, c.cumulative_logprob) for c in shown] == [
        (0, [11, 21], -1.5),
        (1, [13, 23], -2.5),
    ]
    assert [c.logprobs is None for c in shown] == [logprobs is None] * 2
    delta = request.completions[0].delta(cursor)
    assert delta is not None and delta.token_ids == [11, 21] and delta.finish_reason == "length"
    assert request.num_output_tokens == 8  # all that was generated, as it is billed elsewhere


def test_what_was_cut_off_is_never_the_best() -> None:
    outputs, request, _ = submit(SamplingParams(n=1, best_of=3))
    say(outputs, "r-0/0", 10, -9.0, "stop")
    say(outputs, "r-0/1", 11, -0.1)
    assert outputs.abort("r") == ["r-0/1", "r-0/2"]
    [shown] = request.output().outputs
    assert (shown.token_ids, shown.finish_reason) == ([10], "stop")


def test_best_of_must_cover_n() -> None:
    assert SamplingParams(n=3, best_of=3).best_of == 3
    with pytest.raises(InvalidRequestError, match="best_of must be an integer from n to 128"):
        SamplingParams(n=3, best_of=2)


def test_best_of_n_is_n() -> None:
    outputs, request, messages = submit(SamplingParams(n=2, best_of=2))
    assert len(messages) == 2 and messages[0].sampling.logprobs is None
    say(outputs, "r-0/1", 4, None, "length")
    assert request.completions[1].delta(Cursor()) is not None


def test_the_prompt_is_scored_once_for_all_completions() -> None:
    outputs, request, messages = submit(SamplingParams(n=2, prompt_logprobs=1))
    assert [m.sampling.prompt_logprobs for m in messages] == [1, None]
    scores = [
        TokenLogprobs(token_id=token, logprob=-2.0, rank=4, top_token_ids=[9], top_logprobs=[-0.5])
        for token in PROMPT[1:]
    ]
    first = RequestUpdate(request_id="r-0/0", new_token_ids=(7,), prompt_logprobs=scores)
    outputs.apply([RequestUpdate(request_id="r-0/1", new_token_ids=(7,)), first])
    outputs.apply([RequestUpdate(request_id="r-0/0", new_token_ids=(8,))])
    reported = request.output().prompt_logprobs
    assert reported is not None and reported[0] is None
    assert [list(position or ()) for position in reported[1:]] == [[2, 9], [3, 9]]
    assert (reported[1] or {})[2].rank == 4 and (reported[1] or {})[9].logprob == -0.5


def test_a_prompt_of_one_token_has_no_scores() -> None:
    outputs = OutputProcessor(None)
    source = Input(prompt=None, prompt_token_ids=[1], sampling=SamplingParams(prompt_logprobs=0))
    request, _ = outputs.add("r", source)
    assert request.output().prompt_logprobs is None
    say(outputs, "r-0", 5, None)
    assert request.output().prompt_logprobs == [None]
