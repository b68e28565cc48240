"""Checkpoints that are stored quantized compute what transformers does with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_engine
from packed_checkpoints import PACKINGS, fp8, write_mxfp4, write_packed
from tiny_models import continue_greedily, load_reference, prompts, save_checkpoint

from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.inspection.inspect import inspect_model
from llmc.verification.check import check_model

SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("stored"), **SIZES)


def same_as_transformers(stored: Path, wide: Path) -> None:
    asked = prompts((3, 9, 17))
    got = tiny_engine.generate(tiny_engine.start(stored).engine(), asked, 6)
    model = load_reference(wide)
    want = [continue_greedily(model, prompt, 6) for prompt in asked]
    assert tiny_engine.differences(want, got) == (0, [])


# One of each layout; tests/compiler/test_stored_weights.py has all of them.
@pytest.mark.parametrize(
    "name",
    [
        "fp8 in blocks",
        "float-quantized channel",
        "int-quantized",
        "pack-quantized int4 asymmetric",
        "gptq 4 bits",
        "gptq in another order",
        "awq",
    ],
)
def test_tokens_are_those_of_transformers(name: str, plain: Path, tmp_path: Path) -> None:
    same_as_transformers(*write_packed(plain, tmp_path, PACKINGS[name]()))


def test_experts_that_are_stored_one_by_one_in_fp8(tmp_path: Path) -> None:
    plain = save_checkpoint("mixtral", tmp_path / "plain", **SIZES)
    same_as_transformers(*write_packed(plain, tmp_path, fp8((32, 32))))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    plain = save_checkpoint("gpt_oss", tmp_path / "plain", **SIZES)
    same_as_transformers(*write_mxfp4(plain, tmp_path))


def test_check_compares_with_the_same_numbers(plain: Path, tmp_path: Path) -> None:
    """transformers' own loader is given them; it needs no quantizer's package."""
    stored, _ = write_packed(plain, tmp_path, PACKINGS["awq"]())
    config = EngineConfig(
        model=str(stored), device="cpu", dtype="float32", opt_level=0, max_model_len=64
    )
    assert check_model(config, longest_prompt=40).certified


def test_they_are_quantized_again_on_request(plain: Path, tmp_path: Path) -> None:
    stored, _ = write_packed(plain, tmp_path, PACKINGS["awq"]())
    running = tiny_engine.start(stored, quantization="int8")
    (report,) = [r for r in running.started.info.pass_reports if "quantize_linears" in r]
    assert "+[9 llmc.quantized_linear.default]" in report


def test_a_scheme_that_is_not_known_is_refused(plain: Path, tmp_path: Path) -> None:
    packing = PACKINGS["awq"]()
    packing.config["quant_method"] = "bitsandbytes"
    stored, _ = write_packed(plain, tmp_path, packing)
    for start in (tiny_engine.start, lambda path: inspect_model(EngineConfig(model=str(path)))):
        with pytest.raises(CheckpointError, match="quant_method is 'bitsandbytes', of which llmc"):
            start(stored)
