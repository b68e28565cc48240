"""In bfloat16 our logits are as near to the exact ones as transformers' own bfloat16 logits are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_engine
import torch
from tiny_models import VOCAB, load_reference, prompts, reference_logits, save_checkpoint

LENGTHS = tuple(range(1, 41))
TOP = 20
MAX_ERROR = 0.1  # of a log-probability


def top_logprobs(engine: Any, tokens: list[int]) -> torch.Tensor:
    """Our log-probabilities of the first output token: [V], NaN outside the top ones."""
    from llmc.engine.messages import AddRequest
    from llmc.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, logprobs=TOP, max_tokens=1, ignore_eos=True)
    engine.add(AddRequest(request_id="0", prompt_token_ids=tokens, sampling=params))
    out = torch.full((VOCAB,), float("nan"))
    while engine.has_work:
        for update in engine.step():
            assert update.error is None
            for lp in update.logprobs:
                out[list(lp.top_token_ids)] = torch.tensor(list(lp.top_logprobs))
    return out


def test_logprobs_in_bfloat16(tmp_path: Path) -> None:
    """Exact is the same weights computed in float32. Linears are packed where they can be."""
    path = save_checkpoint("qwen3", tmp_path, dtype=torch.bfloat16)
    exact, theirs = load_reference(path), load_reference(path, torch.bfloat16)
    running = tiny_engine.start(path, dtype="bfloat16")
    assert running.started.info.dtype == "bfloat16"
    our_errors, their_errors = [], []
    for prompt in prompts(LENGTHS):
        tokens = list(prompt)
        want = reference_logits(exact, tokens)[-1].log_softmax(-1)
        ours = top_logprobs(running.engine(max_num_batched_tokens=16), tokens)
        seen = ~ours.isnan()
        assert int(seen.sum()) == TOP
        our_errors.append((ours - want)[seen].abs())
        bf16 = reference_logits(theirs, tokens)[-1].log_softmax(-1)
        their_errors.append((bf16 - want)[seen].abs())
    our_error, their_error = torch.cat(our_errors), torch.cat(their_errors)
    assert our_error.max() < MAX_ERROR
    assert our_error.mean() <= 1.2 * their_error.mean()
