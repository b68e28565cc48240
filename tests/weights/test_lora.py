"""Adapters on disk: what is read of good ones, and what is said of those that can't be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from llmc.errors import InvalidRequestError
from llmc.lora_request import LoRARequest
from llmc.weights.lora import LoraPlace, open_adapter, read_adapter

TARGETS = {
    LoraPlace("model.q.weight"): (6, 8),
    LoraPlace("model.o.weight"): (8, 8),
    LoraPlace("model.embed.weight", "embedding"): (8, 5),
}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "peft_version": "0.21"}


def good_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "base_model.model.model.q.lora_A.weight": torch.randn(2, 8),
        "base_model.model.model.q.lora_B.weight": torch.randn(6, 2),
    }


def save(path: Path, config: Any = CONFIG, tensors: dict[str, Tensor] | None = None) -> LoRARequest:
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "adapter_config.json").write_text(text, encoding="utf-8")
    safetensors.torch.save_file(
        good_tensors() if tensors is None else tensors, path / "adapter_model.safetensors"
    )
    return LoRARequest("one", 1, str(path))


@pytest.mark.parametrize(
    "changes,scale",
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q": 3}}, 1.5),
        ({"alpha_pattern": {"elsewhere": 3}}, 4.0),
        ({"r": 7, "rank_pattern": {"model.q": 2}}, 4.0),
    ],
)
def test_scales(changes: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = save(tmp_path, {**CONFIG, **changes})
    weights = read_adapter(adapter, open_adapter(adapter, TARGETS, 2), torch.float32, {})
    ((a, b),) = weights.values()
    stored = good_tensors()
    torch.testing.assert_close(a, stored["base_model.model.model.q.lora_A.weight"])
    torch.testing.assert_close(b, scale * stored["base_model.model.model.q.lora_B.weight"])


COPY = "base_model.model.model.embed.base_layer.weight"
EMBEDDING = {
    "base_model.model.model.embed.lora_embedding_A": torch.ones(2, 5),
    "base_model.model.model.embed.lora_embedding_B": torch.ones(8, 2),
}


def test_a_copy_of_the_models_embedding(tmp_path: Path) -> None:
    own = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    adapter = save(tmp_path, tensors={**EMBEDDING, COPY: own})
    stored = open_adapter(adapter, TARGETS, 2)
    for served in (own, own.bfloat16()):  # PEFT would put the copy into a model of that dtype
        weights = read_adapter(adapter, stored, served.dtype, {"model.embed.weight": served})
        assert list(weights) == [LoraPlace("model.embed.weight", "embedding")]
    changed = own.clone()
    changed[4, 7] += 1
    for plain, reason in (
        ({"model.embed.weight": changed}, "has other values"),
        ({"model.embed.weight": own[:4]}, r"is \[4, 8\] and not \[5, 8\]"),
        ({}, "is not served as it is stored"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            read_adapter(adapter, stored, torch.float32, plain)


def test_a_tied_embedding_without_the_heads_part(tmp_path: Path) -> None:
    adapter = save(tmp_path, {**CONFIG, "ensure_weight_tying": True}, EMBEDDING)
    assert open_adapter(adapter, TARGETS, 2).parts, "embedding and head are two weights"
    tied = {
        **TARGETS,
        LoraPlace("head.weight", "embedding"): (8, 5),
        LoraPlace("model.embed.weight"): (5, 8),
        LoraPlace("head.weight"): (5, 8),
    }
    with pytest.raises(InvalidRequestError, match="nothing on the head"):
        open_adapter(adapter, tied, 2)
    head = {"head.lora_A.weight": torch.ones(2, 8), "head.lora_B.weight": torch.ones(5, 2)}
    both = save(tmp_path, {**CONFIG, "ensure_weight_tying": True}, {**EMBEDDING, **head})
    assert len(open_adapter(both, tied, 2).parts) == 2


A, B = "base_model.model.model.q.lora_A.weight", "base_model.model.model.q.lora_B.weight"


@pytest.mark.parametrize(
    "config,tensors,reason",
    [
        ("{", None, "can't be read"),
        ("[" * 100_000, None, "can't be read"),
        ([], None, "holds no object"),
        ({**CONFIG, "peft_type": "IA3"}, None, "peft_type is 'IA3'"),
        ({**CONFIG, "use_dora": True}, None, "it uses use_dora"),
        ({**CONFIG, "modules_to_save": ["lm_head"]}, None, "it uses modules_to_save"),
        ({**CONFIG, "bias": "all"}, None, "trains biases"),
        ({**CONFIG, "init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa', which ch"),
        ({**CONFIG, "init_lora_weights": "olora"}, None, "path_initial_model_for_weight_conver"),
        ({**CONFIG, "init_lora_weights": ["eva"]}, None, r"init_lora_weights is \['eva'\]"),
        ({**CONFIG, "target_parameters": ["experts.down_proj"]}, None, "it uses target_parameters"),
        ({**CONFIG, "lora_bias": True}, None, "it uses lora_bias"),
        ({**CONFIG, "bias": "lora_only"}, None, "trains biases"),
        ({**CONFIG, "some_new_method": {"a": 1}}, None, "it uses some_new_method"),
        ({**CONFIG, "r": 0}, None, "r in adapter_config.json is 0"),
        ({**CONFIG, "r": "2"}, None, "r in adapter_config.json is '2'"),
        ({**CONFIG, "lora_alpha": 10**400}, None, "lora_alpha in adapter_config.json is 1000"),
        ({**CONFIG, "lora_alpha": float("nan")}, None, "lora_alpha in adapter_config.json is nan"),
        ({**CONFIG, "lora_alpha": None}, None, "lora_alpha in adapter_config.json is None"),
        ({**CONFIG, "rank_pattern": {"(a+)+": 1}}, None, "repeats a group"),
        ({**CONFIG, "alpha_pattern": {"(": 1}}, None, r"alpha_pattern has '\('"),
        ({**CONFIG, "r": 3}, {A: torch.ones(3, 8), B: torch.ones(6, 3)}, "raise max_lora_rank"),
        ({**CONFIG, "r": 1}, None, r"rank 1 and this model take \[1, 8\] and \[6, 1\]"),
        (CONFIG, {A: torch.ones(2, 9), B: torch.ones(6, 2)}, r"lora_A \[2, 9\]"),
        (CONFIG, {A: torch.ones(2, 8)}, "lora_A alone"),
        (CONFIG, {A: torch.ones(2, 8).int(), B: torch.ones(6, 2)}, "torch.int32"),
        (CONFIG, {}, "is empty"),
        (CONFIG, {A.replace(".q.", ".embed."): torch.ones(2, 8)}, "no linear of this model"),
        (CONFIG, {A.replace("A.weight", "magnitude"): torch.ones(2, 8)}, "is no lora_A or"),
        (CONFIG, {"model.q.lora_embedding_A": torch.ones(2, 8)}, "no embedding of this model"),
        (CONFIG, dict([next(iter(EMBEDDING.items()))]), "lora_A alone"),
        (CONFIG, {COPY: torch.ones(5, 8)}, "is empty"),
    ],
)
def test_refused(
    config: Any, tensors: dict[str, Tensor] | None, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        open_adapter(save(tmp_path, config, tensors), TARGETS, 2)
    assert "LoRA adapter 'one'" in str(caught.value)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    for wrong in (float("nan"), float("inf"), 3e38):  # times the scale, the last is infinite
        adapter = save(tmp_path, tensors={**good_tensors(), B: torch.full((6, 2), wrong)})
        parts = open_adapter(adapter, TARGETS, 2)
        with pytest.raises(InvalidRequestError, match=r"model\.q\.weight are not finite"):
            read_adapter(adapter, parts, torch.float32, {})


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is no directory with"):
        open_adapter(LoRARequest("one", 1, str(tmp_path / "nowhere")), TARGETS, 2)
    adapter = save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    parts = open_adapter(adapter, TARGETS, 2)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InvalidRequestError, match="no whole safetensors file"):
        open_adapter(adapter, TARGETS, 2)
    with pytest.raises(InvalidRequestError, match="ends inside tensor"):
        read_adapter(adapter, parts, torch.float32, {})
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(InvalidRequestError, match="pickled adapter_model.bin, which is not opened"):
        open_adapter(adapter, TARGETS, 2)


@pytest.mark.parametrize(
    "name,number,path,param",
    [
        ("", 1, "p", "lora_name"),
        ("../x", 1, "p", "lora_name"),
        ("a/../b", 1, "p", "lora_name"),
        ("a//b", 1, "p", "lora_name"),
        ("a\nb", 1, "p", "lora_name"),
        ("a" * 201, 1, "p", "lora_name"),
        ("a", 0, "p", "lora_int_id"),
        ("a", True, "p", "lora_int_id"),
        ("a", 1, "", "lora_path"),
        ("a", 1, "p\0q", "lora_path"),
    ],
)
def test_requests_for_adapters(name: str, number: int, path: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LoRARequest(name, number, path)
    assert caught.value.param == param
