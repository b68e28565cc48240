"""What the files of a draft head say, by their many names; one sentence for each that is bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_heads
import tiny_models
import torch

from llmc.config import EngineConfig
from llmc.errors import CheckpointError, ConfigError
from llmc.startup.draft_model import resolve_draft, tapped
from llmc.startup.resolve import ModelSource, resolve

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heads.target(tmp_path_factory.mktemp("model") / "target")


def sources(target: Path, head: Path) -> tuple[ModelSource, ModelSource]:
    """Of the target and the head, as they are known before anything is compiled."""
    drafting: Any = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    config = EngineConfig(model=str(target), device="cpu", speculative_config=drafting)
    source = resolve(config, torch.device("cpu"))
    found = resolve_draft(source)
    assert found is not None
    return tapped(source, found), found


def test_the_first_names(target: Path, tmp_path: Path) -> None:
    weights = tiny_heads.random_weights()
    path = tiny_heads.save(tmp_path / "head", weights, eagle_aux_hidden_state_layer_ids=None)
    source, head = sources(target, path)
    assert source.taps == () and not source.config.passes["group_caches"]
    assert head.draft_head is not None and head.draft_head.has_id_map
    assert (head.draft_head.num_taps, head.draft_head.width) == (3, tiny_heads.HIDDEN)
    assert head.model_len == source.model_len > tiny_heads.CONFIG["max_position_embeddings"]
    tensors = head.open_tensors()
    assert "t2d" not in tensors and "model.layers.0.hidden_norm.weight" in tensors
    assert torch.equal(tensors["d2t"].read(), weights["d2t"])


def test_other_names_mean_the_same(target: Path, tmp_path: Path) -> None:
    """Fields below others, `layers.0` and a prefix, what leaves layers in place of what enters."""
    weights = tiny_heads.random_weights(2)
    plain = tiny_heads.save(tmp_path / "plain", weights, eagle_aux_hidden_state_layer_ids=[2, 5])
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": tiny_heads.DRAFT_VOCAB,
        "norm_before_residual": True,
        "transformer_layer_config": {
            k: v
            for k, v in tiny_heads.CONFIG.items()
            if k not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
        },
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]},
    }
    renamed = {"model." + name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
    other = tiny_heads.save(
        tmp_path / "other", renamed, **{**dict.fromkeys(tiny_heads.CONFIG), **nested}
    )
    found = [sources(target, path) for path in (plain, other)]
    assert [source.taps for source, _ in found] == [(2, 5), (2, 5)]
    one, two = (head for _, head in found)
    assert one.draft_head is not None and two.draft_head is not None
    assert two.draft_head.norm_before_residual and not one.draft_head.norm_before_residual
    assert one.open_tensors().keys() == two.open_tensors().keys()
    sizes = [head.load_hf_config().to_dict() for head in (one, two)]
    for name in ("hidden_size", "intermediate_size", "rope_parameters", "head_dim"):
        assert sizes[0][name] == sizes[1][name]


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: w for n, w in weights.items() if n not in names}


def offset(value: int) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        moved = weights["d2t"].clone()
        moved[5] = value
        return weights | {"d2t": moved}

    return change


def same(weights: Weights) -> Weights:
    return weights


VOCAB = tiny_models.VOCAB
BAD: dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], str]] = {
    "no fc": (without("fc.weight"), {}, "has no fc.weight, so it is not an EAGLE-3 head"),
    "no head": (without("lm_head.weight"), {}, "has no lm_head.weight"),
    "no map": (without("d2t"), {}, "has no d2t to tell which of the 96 tokens its 64 are"),
    "a map to no token": (offset(91), {}, "d2t yields token 96 for its token 5, but there are 96"),
    "a map below 0": (offset(-6), {}, "d2t yields token -1 for its token 5"),
    "a short map": (same, {"draft_vocab_size": 63}, r"d2t has shape \[64\] .* 63 integers"),
    "a map of fractions": (
        lambda w: w | {"d2t": w["d2t"].float()},
        {},
        "type torch.float32, but 64 integers are expected",
    ),
    "a wider vocabulary": (same, {"draft_vocab_size": 97}, "draft_vocab_size is 97, but there"),
    "no number": (same, {"hidden_size": "32"}, "hidden_size"),
    "no rows": (same, {"num_attention_heads": 0}, "num_attention_heads|can't be used"),
    "other taps": (
        same,
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]},
        "fc.weight reads 96 values, which are not 5 hidden states",
    ),
    "no layers": (
        same, {"eagle_aux_hidden_state_layer_ids": ["2", 3, 4]}, "layer_ids is .'2', 3, 4"
    ),
    "the last state": (same, {"use_aux_hidden_state": False}, "use_aux_hidden_state false"),
    "a second layer": (
        lambda w: w | {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)},
        {},
        "a tensor 'layers.1.mlp.up_proj.weight'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_head_is_one_sentence(target: Path, tmp_path: Path, name: str) -> None:
    change, config, message = BAD[name]
    head = tiny_heads.save(tmp_path / "head", change(tiny_heads.random_weights()), **config)
    with pytest.raises(CheckpointError, match=message):
        sources(target, head)


def test_two_tokens_of_one(target: Path, tmp_path: Path) -> None:
    weights = tiny_heads.random_weights()
    weights["d2t"][1] = weights["d2t"][0] - 1
    with pytest.raises(CheckpointError, match="d2t maps two of its tokens to the same token"):
        sources(target, tiny_heads.save(tmp_path / "head", weights))


def test_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    head = tiny_heads.save(tmp_path / "head", tiny_heads.random_weights(), vocab_size=95)
    with pytest.raises(ConfigError, match="for a vocabulary of 95 tokens, but 'target' has 96"):
        sources(target, head)


def test_a_directory_without_weights(target: Path, tmp_path: Path) -> None:
    head = tiny_heads.save(tmp_path / "head", tiny_heads.random_weights())
    (head / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        sources(target, head)
