"""Speculation as a user switches it on: the default model's answers stay what they were."""

from __future__ import annotations

import pytest
from real_model import needs_model

from llmc import LLM, SamplingParams

pytestmark = [
    pytest.mark.e2e,
    needs_model,
]
PROMPTS = ["The cat sat on the mat. " * 4, "What is a block? What is a block? What is", "Hello"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.7, seed=3, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=32, stop=["the"], repetition_penalty=1.2),
]


def test_answers_of_the_default_model_stay_the_same() -> None:
    answers = []
    for speculative_config in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        with LLM(
            dtype="float32",  # narrower ones may round a step of several tokens otherwise
            opt_level=0,
            max_model_len=256,
            max_num_seqs=4,
            speculative_config=speculative_config,
        ) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, progress=False)
            assert llm._engine is not None
            stats = llm._engine.stats()
            assert (stats.num_draft_tokens > 0) == (speculative_config is not None)
        answers.append(
            [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].stop_reason) for o in outputs]
        )
    assert answers[0] == answers[1]
