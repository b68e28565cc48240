"""LLM.beam_search: prompts of every spelling, texts, errors of one prompt, interrupts."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_engine import REPLY, Scripted, make_scripted

from llmc import BeamSearchParams
from llmc.errors import EngineDeadError, InvalidRequestError
from llmc.llm import LLM

PARAMS = BeamSearchParams(beam_width=3, max_tokens=120)


@pytest.fixture
def scripted() -> Scripted:
    return make_scripted()


@pytest.fixture
def llm(scripted: Scripted) -> LLM:
    return LLM.from_started(scripted, scripted.config, scripted.tokenizer)


def test_the_best_sequence_is_the_likeliest_text(llm: LLM, scripted: Scripted) -> None:
    [output] = llm.beam_search("hello", PARAMS)
    best = output.sequences[0]
    reply = [*scripted.tokenizer.encode(REPLY), scripted.tokenizer.eos_token_id]
    assert best.tokens == [*output.prompt_token_ids, *reply]
    assert (best.text, best.finish_reason) == (f"hello{REPLY}", "stop")
    assert best.cum_logprob == pytest.approx(-0.5 * len(reply))
    assert (output.prompt, output.error, len(output.sequences)) == ("hello", None, 3)
    assert len({tuple(one.tokens) for one in output.sequences}) == 3
    scripted.assert_idle()


def test_prompts_in_order_and_one_that_is_refused(llm: LLM, scripted: Scripted) -> None:
    ids = scripted.tokenizer.encode("count")
    outputs = llm.beam_search(["count", ids, "hello " * 200, {"prompt": "x"}], PARAMS)
    assert outputs[0].sequences == outputs[1].sequences != outputs[3].sequences
    assert [bool(output.error) for output in outputs] == [False, False, True, False]
    assert "context" in (outputs[2].error or "") and outputs[2].sequences == []
    with pytest.raises(InvalidRequestError, match="beam_width 5"):
        llm.beam_search("x", BeamSearchParams(beam_width=5))
    scripted.assert_idle()


def test_one_that_fails_ends_alone(llm: LLM, scripted: Scripted) -> None:
    scripted.runner.nan_word = "bad"
    bad, good = llm.beam_search(["bad", "good"], PARAMS)
    assert "not finite" in (bad.error or "") and bad.sequences == []
    assert good.error is None and len(good.sequences) == 3
    scripted.assert_idle()


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, scripted: Scripted) -> None:
    golden = llm.beam_search("count", PARAMS)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        calls = iter(range(5))

        def step() -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return type(scripted.engine).step(scripted.engine)

        patch.setattr(scripted.engine, "step", step)
        llm.beam_search(["a", "b", "c"], PARAMS)
    again = llm.beam_search("count", PARAMS)
    assert again[0].sequences == golden[0].sequences
    scripted.assert_idle()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.beam_search("x", PARAMS)
