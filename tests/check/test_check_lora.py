"""A check with LoRA adapters: requests of each and of the model alone, beside transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiers import tiered
from tiny_adapters import save_adapter
from tiny_configs import save_random, tiny_config
from tiny_models import FAMILIES, load_reference, save_checkpoint

from llmc.check import check as check_module
from llmc.check import variants
from llmc.check.check import check_model, find_certificate
from llmc.cli.check import with_lora
from llmc.config import EngineConfig
from llmc.errors import ConfigError, InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.runner.adapter_store import fill_slot
from llmc.weights.lora_places import LoraPlace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[LoRARequest]:
    folder = model.parent / "adapters"
    return [
        save_adapter(
            load_reference(model), folder / "small", number=1, r=3, target_modules=["q_proj"]
        ),
        save_adapter(
            load_reference(model),
            folder / "wide",
            number=2,
            r=8,
            use_rslora=True,
            target_modules=["k_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"],
            save_embedding_layers="auto",
        ),
    ]


@pytest.fixture(autouse=True)
def own_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "cache_dir", lambda: tmp_path)


@pytest.fixture
def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", opt_level=0, enable_lora=True, max_loras=2)


def test_requests_of_several_adapters_are_certified(
    config: EngineConfig, adapters: list[LoRARequest]
) -> None:
    made = check_model(config, adapters=adapters)
    assert made.certified and made.logits.relative < 2e-5
    assert [name.split()[0] for name in made.adapters] == ["small", "wide"]
    assert find_certificate(config) is None, "it says nothing about the model without adapters"
    alone = check_model(config)
    assert alone.certified and alone.key != made.key and alone.adapters == ()
    assert find_certificate(config) == alone


def test_a_wrong_adapter_is_seen(
    config: EngineConfig, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_little(targets, slot, weights):  # type: ignore[no-untyped-def]
        place = LoraPlace("model.layers.1.self_attn.o_proj.weight")
        if place in weights:
            a, b = weights[place]
            weights = {**weights, place: (a, b * 1.01)}
        fill_slot(targets, slot, weights)

    monkeypatch.setattr(variants, "fill_slot", off_by_little)
    made = check_model(config, adapters=adapters)
    assert not made.certified and not made.is_fixable
    assert made.layers[0].is_good and not made.layers[1].is_good
    assert [culprit.kind for culprit in made.culprits] == ["engine"]


def test_bfloat16_is_compared_in_float32_too(model: Path, adapters: list[LoRARequest]) -> None:
    config = EngineConfig(
        model=str(model), device="cpu", opt_level=0, dtype="bfloat16", enable_lora=True
    )
    made = check_model(config, adapters=adapters[1:])
    assert made.certified and made.noise is not None
    assert made.float32 is not None and made.float32.relative < 2e-5
    assert made.dtype == str(torch.bfloat16).removeprefix("torch.")


@pytest.mark.parametrize(
    "family", tiered(["mixtral", "gpt_oss", "llama4_text"], "mixtral", "llama4_text")
)
def test_adapters_on_routed_experts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    if family in FAMILIES:
        save_checkpoint(family, path)
    else:
        save_random(tiny_config(family), path)
    adapter = save_adapter(
        load_reference(path), tmp_path / "experts", r=3, target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    config = EngineConfig(
        model=str(path), device="cpu", opt_level=0, enable_lora=True, max_lora_expert_rank=3,
        dtype="bfloat16" if family == "gpt_oss" else "float32",
    )  # fmt: skip
    made = check_model(config, adapters=[adapter])
    exact = made.logits if made.float32 is None else made.float32
    assert exact.relative < 2e-5
    # in bfloat16, rounding chooses other experts of so small a model: on some CPUs more often than
    # the limits, which are multiples of transformers' own noise, allow
    assert made.certified or made.float32 is not None
    block = "feed_forward" if family == "llama4_text" else "mlp"
    place = LoraPlace(f"model.layers.1.{block}.experts.down_proj", "experts")

    def without_one(targets, slot, weights):  # type: ignore[no-untyped-def]
        a, b = weights[place]
        fill_slot(targets, slot, {**weights, place: (a.roll(1, 0), b)})

    monkeypatch.setattr(variants, "fill_slot", without_one)
    wrong = check_model(config, adapters=[adapter])
    assert not wrong.certified
    assert (wrong.logits if wrong.float32 is None else wrong.float32).relative > 2e-5


def test_what_can_not_be_checked(config: EngineConfig, adapters: list[LoRARequest]) -> None:
    with pytest.raises(InvalidRequestError, match=r"its rank is 8, but the limit is 4"):
        check_model(
            EngineConfig(
                model=config.model, device="cpu", opt_level=0, enable_lora=True, max_lora_rank=4
            ),
            adapters=adapters[1:],
        )
    with pytest.raises(ConfigError, match="at most 3 adapters at a time, got 4"):
        with_lora(config, [adapters[0].lora_path] * 4)


def test_the_command_makes_a_slot_for_each(config: EngineConfig) -> None:
    made, asked = with_lora(config, ["some/poems v2", "other", "third/"])
    assert made.enable_lora and made.max_loras == 3
    assert [(one.lora_name, one.lora_int_id) for one in asked] == [
        ("1-poems-v2", 1),
        ("2-other", 2),
        ("3-third", 3),
    ]
    assert with_lora(config, []) == (config, [])
