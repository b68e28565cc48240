"""A quantized model is near what it was made of: logits of a tiny one, text of the default one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from real_model import needs_model
from shared_captures import shared_captures
from tiers import tiered
from tiny_adapters import peft_model, save_adapter
from tiny_models import (
    continue_greedily,
    load_reference,
    prompts,
    reference_logits,
    save_checkpoint,
)

from llmc import LLM, SamplingParams
from llmc.errors import ConfigError
from llmc.kernels.quantized_linear import FORMATS, Format, dequantize, quantization_of, quantize

# rms error of the log-probabilities of the likeliest tokens, of a model of random weights
MAX_ERROR = {"int8": 0.06, "fp8": 0.25, "int4": 0.6}
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("quantized"), **SIZES)


def quantized_reference(path: Path, format: Format) -> Any:
    """transformers' model with every linear's weight put through the format and back, and those of
    routed experts."""
    model = load_reference(path)
    for name, parameter in model.named_parameters():
        for expert in parameter.data if parameter.dim() == 3 else ():
            weight = expert.T if "gpt_oss" in str(path) else expert
            to = quantization_of(format, *weight.shape)
            assert to is not None, name
            weight.copy_(dequantize(*quantize(weight, to)))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kept: Format = "int8" if name == "lm_head" else format
            to = quantization_of(kept, *module.weight.shape)
            assert to is not None
            with torch.no_grad():
                channels = len(module.weight)
                module.weight.copy_(dequantize(*quantize(module.weight, to))[:channels])
    return model


@pytest.mark.parametrize("format", FORMATS)
def test_the_quantized_weights_are_computed_with_exactly(checkpoint: Path, format: Format) -> None:
    running = tiny_engine.start(checkpoint, quantization=format, activation_bits=32)
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    assert "+[9 llmc.quantized_linear.default]" in report, "two layers of four, and the head"
    exact, original = quantized_reference(checkpoint, format), load_reference(checkpoint)
    asked = prompts((3, 9, 17, 25))
    got = tiny_engine.generate(running.engine(), asked, 6)
    want = [continue_greedily(exact, prompt, 6) for prompt in asked]
    assert tiny_engine.differences(want, got) == (0, [])
    errors = []
    for prompt, answer in zip(asked, got, strict=True):
        plain = reference_logits(original, list(prompt))[-1].log_softmax(-1)
        errors.append(answer.logprobs[0] - float(plain[answer.tokens[0]]))
    error = float(torch.tensor(errors).pow(2).mean().sqrt())
    assert 0 < error < MAX_ERROR[format]


def test_so_is_an_embedding_tied_to_a_head_of_no_whole_blocks(tmp_path: Path) -> None:
    path = save_checkpoint("qwen3", tmp_path, **SIZES, tie_word_embeddings=True, vocab_size=131)
    running = tiny_engine.start(path, quantization="int4", activation_bits=32)
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    assert "1 llmc.quantized_embedding.default, 9 llmc.quantized_linear.default]" in report
    asked, exact = prompts((3, 9, 17, 25)), quantized_reference(path, "int4")
    want = [continue_greedily(exact, prompt, 6) for prompt in asked]
    assert tiny_engine.differences(want, tiny_engine.generate(running.engine(), asked, 6)) == (
        0,
        [],
    )


@pytest.mark.parametrize(("family", "format"), [("mixtral", "int4"), ("gpt_oss", "int8")])
def test_so_are_those_of_routed_experts(family: str, format: Format, tmp_path: Path) -> None:
    """gpt_oss has them by input, with biases. Beside them, in full, what an adapter adds."""
    path = save_checkpoint(family, tmp_path / family, **SIZES)
    running = tiny_engine.start(
        path, quantization=format, activation_bits=32, enable_lora=True, max_lora_expert_rank=2
    )
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    assert "4 llmc.quantized_expert_linear.default" in report, "two layers of two"
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = save_adapter(
        load_reference(path), tmp_path / "a", r=2, target_modules=[], target_parameters=stacks
    )
    exact, asked = quantized_reference(path, format), prompts((3, 9, 17))
    for used in (None, adapter):
        engine = running.engine(adapters=running.started.engine._features.adapters)
        got = tiny_engine.generate(engine, asked, 6, adapter=used)
        with peft_model(exact, used) as model:
            want = [continue_greedily(model, prompt, 6) for prompt in asked]
        assert tiny_engine.differences(want, got) == (0, [])


@needs_model
@pytest.mark.parametrize("format", tiered(FORMATS, "int4"))
def test_the_default_model_still_knows_a_fact(format: Format) -> None:
    with shared_captures():
        llm = LLM(quantization=format, max_model_len=512, opt_level=0)
    (answer,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0.0, max_tokens=40),
    )
    assert "Paris" in answer.outputs[0].text


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'int3'; choose one of int8, int4"):
        tiny_engine.start(Path("nowhere"), quantization="int3")
