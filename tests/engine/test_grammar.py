"""Requests that wait for a grammar: order, aborts, refusals; and chunks that are scored."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import pytest
from fake_runner import VOCAB, DigitMatcher, FakeRunner, Outcome, run, run_alone

from llmc.engine.core import EngineCore
from llmc.engine.grammar import Matcher
from llmc.engine.messages import AddRequest
from llmc.engine.options import MAX_SCORED, EngineFeatures, EngineLimits
from llmc.errors import InvalidRequestError
from llmc.sampling_params import SamplingParams
from llmc.structured_outputs import StructuredOutputsParams

CONTEXT = 1200


class SlowGrammars:
    """Matchers are there when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[StructuredOutputsParams, Future[Matcher]]] = []
        self.is_known = False

    def begin(self, spec: StructuredOutputsParams) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        self.asked.append((spec, future))
        if self.is_known:
            self.finish(-1)
        return future

    def finish(self, index: int) -> None:
        spec, future = self.asked[index]
        future.set_result(DigitMatcher(spec.text))


@pytest.fixture
def grammars() -> SlowGrammars:
    return SlowGrammars()


def make_engine(grammars: Any, depth: int = 2, **options: Any) -> EngineCore:
    runner = FakeRunner(
        num_blocks=400, block_size=4, max_tokens=2048, max_rows=8, max_in_flight=depth
    )
    return EngineCore(
        runner,
        EngineLimits(
            num_blocks=400,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
        ),
        EngineFeatures(eos_token_ids=[0], grammars=grammars, **options),
    )


def message(request_id: str, grammar: str | None = "3", **fields: Any) -> AddRequest:
    spec = None if grammar is None else StructuredOutputsParams(regex=grammar)
    options = {"max_tokens": 8, "seed": 1, "structured_outputs": spec, "ignore_eos": spec is None}
    options |= fields.pop("sampling", {})
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=fields.pop("prompt", [1, 2, 3, 4, 5]),
        sampling=SamplingParams(**options),
        **fields,
    )


def test_others_go_on_while_a_grammar_is_compiled(grammars: SlowGrammars) -> None:
    engine = make_engine(grammars)
    slow, plain = message("slow"), message("plain", None)
    engine.add(slow)
    engine.add(plain)
    got = Outcome()
    while got.finish_reason is None:
        for update in engine.step():
            assert update.request_id == "plain"
            got.take(update)
    assert engine.has_work and engine.stats().num_waiting == 1
    assert engine.step() == []  # waits for a moment, and has no news
    grammars.finish(0)
    outcome = run(engine)["slow"]
    assert outcome == run_alone(slow, 1, CONTEXT)
    assert (outcome.finish_reason, outcome.is_whole, len(outcome.tokens)) == ("stop", True, 3)


def test_siblings_enter_in_order_and_share_the_prompt(grammars: SlowGrammars) -> None:
    engine = make_engine(grammars, enable_prefix_caching=False)
    messages = [message(f"r{i}", fork_of="r0" if i else None) for i in range(3)]
    engine.add(messages[0])
    grammars.is_known = True
    for one in messages[1:]:  # these need not wait for the grammar, but for the first one
        engine.add(one)
    assert engine.stats().num_waiting == 3
    grammars.finish(0)
    outcomes = run(engine)
    assert {one.request_id: run_alone(one, 1, CONTEXT) for one in messages} == outcomes
    num_prompt = len(messages[0].prompt_token_ids)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert runner.num_computed == num_prompt + 2 + 2 * (1 + 2)  # the prompt once


def test_a_grammar_that_fails_ends_its_request_alone(grammars: SlowGrammars) -> None:
    engine = make_engine(grammars)
    engine.add(message("wrong"))
    engine.add(message("plain", None))
    grammars.asked[0][1].set_exception(InvalidRequestError("not a grammar"))
    outcomes = run(engine)
    assert outcomes["wrong"].finish_reason == "error"
    assert outcomes["wrong"].error == "not a grammar"
    assert outcomes["plain"] == run_alone(message("plain", None), 1, CONTEXT)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_matcher_that_breaks_ends_its_request_alone(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    grammars = SlowGrammars()
    grammars.is_known = True
    engine = make_engine(grammars, depth)
    engine.add(message("breaks", "2!"))
    engine.add(message("whole", "4"))
    outcomes = run(engine)
    assert len(outcomes["breaks"].tokens) == 1  # the second one is never shown
    assert outcomes["breaks"].error == "structured_outputs failed: it broke"
    assert outcomes["whole"] == run_alone(message("whole", "4"), 1, CONTEXT)
    stats = engine.stats()
    assert stats.num_failed_steps == 0
    assert stats.num_generated_tokens == sum(len(one.tokens) for one in outcomes.values())


def test_a_cached_matcher_that_breaks_at_once_ends_its_request_alone(
    grammars: SlowGrammars, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    grammars.is_known = True
    engine = make_engine(grammars)
    engine.add(message("breaks", "0!"))
    engine.add(message("whole", "4"))
    outcomes = run(engine)
    assert outcomes["breaks"].error == "it broke"
    assert outcomes["whole"] == run_alone(message("whole", "4"), 1, CONTEXT)


def test_a_grammar_that_fails_is_told_as_the_fault_of_its_request(grammars: SlowGrammars) -> None:
    """So that a server answers 400, which clients do not retry."""
    engine = make_engine(grammars)
    engine.add(message("wrong"))
    grammars.asked[0][1].set_exception(InvalidRequestError("not a grammar"))
    grammars.is_known = True
    engine.add(message("breaks", "2!"))
    updates = []
    while engine.has_work:
        updates += engine.step()
    ended = {one.request_id: one.is_refused for one in updates if one.finish_reason is not None}
    assert ended == {"wrong": True, "breaks": True}


def test_a_request_that_waits_can_be_aborted_and_its_id_used_again(
    grammars: SlowGrammars,
) -> None:
    engine = make_engine(grammars)
    engine.add(message("a"))
    with pytest.raises(InvalidRequestError, match="is being served"):
        engine.add(message("a"))
    update = engine.abort("a")
    assert update is not None and update.finish_reason == "abort"
    assert not engine.has_work and engine.abort("a") is None
    engine.add(message("a", None))
    assert run(engine)["a"].finish_reason == "length"


def test_without_grammars_they_are_refused() -> None:
    engine = make_engine(None)
    with pytest.raises(InvalidRequestError, match="not available") as caught:
        engine.add(message("a"))
    assert caught.value.param == "structured_outputs"
    assert not engine.has_work


def test_an_end_token_may_end_it_with_ignore_eos_too(grammars: SlowGrammars) -> None:
    engine = make_engine(grammars)
    request = message("a", "9", sampling={"ignore_eos": True, "max_tokens": 20})
    engine.add(request)
    grammars.finish(0)
    outcome = run(engine)["a"]
    assert outcome == run_alone(request, 1, CONTEXT)
    assert outcome.finish_reason == "stop"


def test_scored_prompts_go_in_small_chunks_beside_others(grammars: SlowGrammars) -> None:
    engine = make_engine(grammars, enable_prefix_caching=True)
    wants: dict[str, Any] = {"sampling": {"prompt_logprobs": 0}}
    long = [1 + i % 7 for i in range(700)]
    engine.add(message("scored", None, prompt=long, **wants))
    engine.add(message("again", None, prompt=long, **wants))
    engine.add(message("plain", None, prompt=long[1:]))
    outcomes = run(engine)
    assert len(outcomes["scored"].scores) == 699
    assert outcomes["again"] == outcomes["scored"]
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert runner.num_scored == 2 * 699  # cached blocks don't stand in for scores
    assert engine.stats().num_steps >= 2 * 699 / MAX_SCORED
    one = message("scored", None, prompt=long, **wants)
    assert outcomes["scored"] == run_alone(one, 1, CONTEXT)
    assert outcomes["plain"] == run_alone(message("plain", None, prompt=long[1:]), 1, CONTEXT)
