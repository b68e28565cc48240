"""A whole engine whose every op is Triton, after the passes for GPUs, under the interpreter: its
tokens are transformers' own.

Run by test_ops_triton.py, for the same reason as interpreted_ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fast_interpreter  # noqa: F401 - the tests take a fraction of the time
import pytest
import tiny_engine
import tiny_models
from packed_checkpoints import PACKINGS, write_mxfp4, write_packed
from tiers import tiered
from tiny_configs import save_random, tiny_config

import llmc.kernels.triton  # noqa: F401 - registers the versions under test
from llmc.kernels.triton import latent_attention
from llmc.kernels.triton.launch import Launch
from llmc.kernels.triton.linear_configs import FUSED_ROWS
from llmc.passes import pipeline, split_prompts
from llmc.passes.options import PipelineOptions
from llmc.runner.delta import LEAST_TOKENS
from llmc.startup import compile as compile_module

NUM_TOKENS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # whole blocks of 32 inputs
ALWAYS = {"attention_kernel", "process_kernel", "draw_kernel"}
ALWAYS |= {"rope_write_kernel", "rope_attention"}  # for prompts, and for decodes
LAUNCHED = {
    "qwen3": ALWAYS | {"norm_kernel", "act_mul_kernel"},
    "mixtral": ALWAYS
    | {"expert_kernel", "route_kernel", "choose_experts_kernel", "sum_experts_kernel"},
    "glm4_moe": ALWAYS | {"expert_kernel", "route_kernel", "sum_experts_kernel"},
    "glm4_moe in pack-quantized int4 group": ALWAYS
    | {"low_bit_expert_kernel", "choose_experts_kernel"},
    "qwen2_moe": ALWAYS | {"expert_kernel", "route_kernel", "sum_experts_kernel"},
    "gpt_oss": ALWAYS | {"expert_kernel", "route_kernel"},
    "gpt_oss in mxfp4": ALWAYS | {"low_bit_expert_kernel", "route_kernel"},
    "qwen3_next": ALWAYS | {"delta_rule_kernel", "delta_chunks_kernel", "gated_norm_kernel"},
    "mamba2": {"causal_conv_kernel", "selective_scan_kernel", "gated_norm_kernel"},
}


def for_gpus(**options: Any) -> PipelineOptions:
    return PipelineOptions(**{**options, "device_type": "cuda"})


@pytest.mark.parametrize("family", tiered(LAUNCHED, "qwen3", "mixtral", "mamba2"))
def test_greedy_tokens_with_every_op_in_triton(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = set()
    run = Launch.run

    def recorded(launch: Launch) -> None:
        launched.add(launch.kernel.__name__)
        if launch.constants.get("ROPE"):
            launched.add("rope_attention")
        run(launch)

    monkeypatch.setattr(Launch, "run", recorded)
    monkeypatch.setattr(compile_module, "PipelineOptions", for_gpus)
    name, _, form = family.partition(" in ")
    if name in tiny_models.FAMILIES:
        path = wide = tiny_models.save_checkpoint(name, tmp_path, **(SIZES if form else {}))
    else:
        sizes = {**SIZES, "moe_intermediate_size": 64} if form else {}
        path = wide = save_random(tiny_config(name, **sizes), tmp_path)
    if form == "mxfp4":
        path, wide = write_mxfp4(path, tmp_path)
    elif form:
        path, wide = write_packed(path, tmp_path, PACKINGS[form]())
    running = tiny_engine.start(path, activation_bits=32)  # on GPUs, no inputs are rounded to 16
    # chunks of prompts, with more rows than are multiplied together with their activation
    engine = running.engine(max_num_batched_tokens=FUSED_ROWS + 4)
    lengths = (11, 3, 26) if family == "qwen3" else (11, 3)  # one shows that prompts are divided
    prompts = tiny_models.prompts(lengths)
    model = tiny_models.load_reference(wide)
    made = tiny_engine.generate(engine, prompts, NUM_TOKENS)
    for prompt, got in zip(prompts, made, strict=True):
        want = tiny_models.continue_greedily(model, prompt, NUM_TOKENS)
        assert min(want.margins) > 1e-4
        assert tuple(got.tokens) == want.tokens
    assert launched >= LAUNCHED[family]


@pytest.mark.exhaustive
def test_long_prompts_expand_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hint that the runner gives on GPUs: fresh prompts, chunks of them, and decodes."""
    expanded = set()
    expand = latent_attention._expanded

    def kept(step: Mapping[str, Any], contexts: tuple[int, ...]) -> Any:
        expanded.add((tuple(step["query_start"].diff().tolist()), contexts))
        return expand(step, contexts)

    monkeypatch.setattr(latent_attention, "_expanded", kept)
    monkeypatch.setitem(LEAST_TOKENS, "long_prompts", 33)
    monkeypatch.setattr(pipeline, "split_prompts", lambda **_: split_prompts.split_prompts())
    path = save_random(tiny_config("deepseek_v3"), tmp_path)
    engine = tiny_engine.start(path, max_model_len=160).engine(max_num_batched_tokens=50)
    prompts = tiny_models.prompts((3, 90, 40))
    model = tiny_models.load_reference(path)
    made = tiny_engine.generate(engine, prompts, 2)
    for prompt, got in zip(prompts, made, strict=True):
        want = tiny_models.continue_greedily(model, prompt, 2)
        assert min(want.margins) > 1e-4
        assert tuple(got.tokens) == want.tokens
    assert {((47,), (47,)), ((34,), (40,))} <= expanded
