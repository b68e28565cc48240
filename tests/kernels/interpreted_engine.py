"""A whole engine whose every op is Triton, under the interpreter: its tokens are transformers' own.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from pathlib import Path

import fast_interpreter  # noqa: F401 - the tests take a third of the time
import pytest
import tiny_engine
import tiny_models
from packed_checkpoints import write_mxfp4
from tiers import tiered

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.triton import paged_attention
from llmc.kernels.triton.launch import Launch

NUM_TOKENS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # whole blocks of 32 inputs
ALWAYS = {"attention_kernel", "stats_kernel", "draw_kernel", "apply_kernel"}
LAUNCHED = {
    "qwen3": ALWAYS | {"rope_write_kernel", "norm_kernel", "act_mul_kernel"},
    "gpt_oss": ALWAYS | {"expert_kernel"},
    "gpt_oss in mxfp4": ALWAYS | {"low_bit_expert_kernel"},
}


@pytest.mark.parametrize("family", tiered(LAUNCHED, "qwen3"))
def test_greedy_tokens_with_every_op_in_triton(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = set()
    run = Launch.run

    def recorded(launch: Launch) -> None:
        launched.add(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", recorded)
    monkeypatch.setattr(paged_attention, "multiprocessors", lambda device: 2)
    name, _, form = family.partition(" in ")
    path = wide = tiny_models.save_checkpoint(name, tmp_path, **(SIZES if form else {}))
    if form == "mxfp4":
        path, wide = write_mxfp4(path, tmp_path)
    engine = tiny_engine.start(path).engine(max_num_batched_tokens=16)  # so prompts are chunked
    lengths = (11, 3, 26) if family == "qwen3" else (11, 3)  # one shows that prompts are divided
    prompts = tiny_models.prompts(lengths)
    model = tiny_models.load_reference(wide)
    made = tiny_engine.generate(engine, prompts, NUM_TOKENS)
    for prompt, got in zip(prompts, made, strict=True):
        want = tiny_models.continue_greedily(model, prompt, NUM_TOKENS)
        assert min(want.margins) > 1e-4
        assert tuple(got.tokens) == want.tokens
    assert launched >= LAUNCHED[family]
