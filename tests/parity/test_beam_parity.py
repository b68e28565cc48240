"""Beam searches find what transformers' `generate(num_beams=...)` finds, on a real cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engine import LOGPROB_TOLERANCE, TIE

from llmc.engine.messages import AddRequest
from llmc.sampling_params import BeamSearchParams, SamplingParams

NEW_TOKENS = 9

SEARCHES = [
    BeamSearchParams(beam_width=4, max_tokens=NEW_TOKENS),
    BeamSearchParams(beam_width=3, max_tokens=NEW_TOKENS, early_stopping=True, length_penalty=0.0),
    BeamSearchParams(
        beam_width=2, max_tokens=NEW_TOKENS, early_stopping="never", length_penalty=2.0
    ),
    BeamSearchParams(beam_width=3, max_tokens=NEW_TOKENS, ignore_eos=True, length_penalty=-0.5),
]


def reference(
    model: Any, prompt: tuple[int, ...], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Sequences after the prompt with their scores, best first."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=None if params.ignore_eos else ends,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    outputs = out.sequences[:, len(prompt) :].tolist()
    cut = [tokens[:length] for tokens, length in zip(outputs, lengths, strict=True)]
    return list(zip(cut, out.sequences_scores.tolist(), strict=True))


def test_searches_equal_the_reference(subject: Any) -> None:
    """All at once, in fewer rows than they have beams; some end at tokens that the model draws."""
    ends = sorted({subject.expected[1].tokens[2], subject.expected[2].tokens[4]})
    engine = subject.running.engine(enable_prefix_caching=False, eos_token_ids=ends)
    asked = [
        (params, continuation.prompt)
        for params, continuation in zip(SEARCHES, subject.expected[1:], strict=False)
    ]
    searches = []
    for index, (params, prompt) in enumerate(asked):
        message = AddRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
            ),
        )
        searches.append(engine.search(message, params))
    while engine.has_work:
        engine.step()
    engine.check()
    ends_by = {one.finish_reason for search in searches for one in search.finished}
    assert ends_by == {"stop", "length"}
    for search, (params, prompt) in zip(searches, asked, strict=True):
        assert search.error is None and search.is_over
        expected = reference(subject.model, prompt, params, ends)
        scores = [score for _, score in expected]
        assert [one.score for one in search.finished] == pytest.approx(
            scores, abs=LOGPROB_TOLERANCE
        )
        gaps = [a - b for a, b in zip(scores, scores[1:], strict=False)]
        if min(gaps, default=1.0) > TIE:
            assert [list(one.token_ids) for one in search.finished] == [t for t, _ in expected]
