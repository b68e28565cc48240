"""On a GPU our bfloat16 logits are as near to the exact ones as transformers' own bfloat16 are.

Exact is the same weights computed in float32 on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from gpu import DEVICE, DRY_RUN, LEVELS, needs_gpu
from tiny_models import load_reference, prompts, reference_logits, save_checkpoint

from llmc.engine.plan import NewRow, RowWork, StepPlan
from llmc.sampling_params import SamplingParams

pytestmark = needs_gpu
LENGTHS = (2, 5, 17, 33, 40)
SMALL: dict[str, Any] = {"kv_cache_memory": 2**22}  # others may be using the GPU's memory
MAX_ERROR = 0.1  # of a log-probability
FLOAT32_ERROR = 1e-4


def our_logprobs(running: tiny_engine.Running, tokens: tuple[int, ...]) -> torch.Tensor:
    """Of the token after a prompt, computed in one step: [V]."""
    new = NewRow(
        row=0,
        request_id="0",
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_token_ids=(),
    )
    rows = running.started.runner.rows
    blocks = range(-(-len(tokens) // rows.block_size) * rows.num_groups)
    work = RowWork(row=0, start=0, num_tokens=len(tokens), sample=True, new_blocks=blocks)
    plan = StepPlan(step=0, released_rows=(0,), new_rows=(new,), work=(work,))
    logits: Any = running.started.runner.logits(plan)
    return logits[0].float().log_softmax(-1).cpu()


@pytest.mark.parametrize("level", sorted({0, *LEVELS}))
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_bfloat16_logits(family: str, level: int, tmp_path: Path) -> None:
    path = save_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    exact = load_reference(path)
    theirs = load_reference(path, torch.bfloat16).to(DEVICE)
    running = tiny_engine.start(
        path, device=DEVICE.type, dtype="bfloat16", opt_level=level, **SMALL
    )
    our_errors, their_errors = [], []
    for prompt in prompts(LENGTHS):
        want = reference_logits(exact, list(prompt))[-1].log_softmax(-1)
        our_errors.append((our_logprobs(running, prompt) - want).abs())
        with torch.no_grad():
            out = theirs(input_ids=torch.tensor([prompt], device=DEVICE), use_cache=False)
        their_errors.append((out.logits[0, -1].float().log_softmax(-1).cpu() - want).abs())
    ours, others = torch.cat(our_errors), torch.cat(their_errors)
    assert ours.max() < MAX_ERROR
    assert ours.mean() <= 1.2 * others.mean()


@pytest.mark.parametrize("level", sorted({0, *LEVELS}))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_float32_logits_dry_run(family: str, level: int, tmp_path: Path) -> None:
    path = save_checkpoint(family, tmp_path)
    exact = load_reference(path)
    running = tiny_engine.start(path, device=DEVICE.type, dtype="float32", opt_level=level, **SMALL)
    for prompt in prompts(LENGTHS):
        want = reference_logits(exact, list(prompt))[-1].log_softmax(-1)
        torch.testing.assert_close(our_logprobs(running, prompt), want, rtol=0, atol=FLOAT32_ERROR)
    assert DRY_RUN or running.started.info.device.startswith("cuda")
