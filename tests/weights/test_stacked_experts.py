"""Experts that are stored one by one are read into the parameters that stack them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor, nn

from llmc.weights.checkpoint import open_checkpoint
from llmc.weights.load import CheckpointWeights, DummyWeights
from llmc.weights.parameters import describe_parameters
from llmc.weights.stacked_experts import StackedExperts, parts_of

COUNT, WIDTH, INNER = 12, 6, 4  # numbers with one digit and with two


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER + 1)
        self.scale = nn.Parameter(torch.ones(()))


class Model(tf.PreTrainedModel):
    config_class = tf.PretrainedConfig

    def __init__(self) -> None:
        super().__init__(tf.PretrainedConfig())
        self.mlp = nn.Module()
        self.mlp.experts = nn.ModuleList(Expert() for _ in range(COUNT))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are filled by the tests."""


PARTS = {
    "w1_w3": ("w1.weight", "w3.weight"),
    "w1_w3_bias": ("w1.bias", "w3.bias"),
    "scale": ("scale",),
}


def _stacked() -> Model:
    model = Model()
    experts = model.mlp.experts
    assert isinstance(experts, nn.ModuleList)
    model.mlp.experts = StackedExperts(experts, PARTS)
    return model


def _joined(tensors: dict[str, Tensor], name: str) -> Tensor:
    each = [[tensors[f"mlp.experts.{i}.{part}"] for part in PARTS[name]] for i in range(COUNT)]
    return torch.stack([torch.cat(one) if len(one) > 1 else one[0] for one in each])


def test_they_are_read_from_checkpoints(tmp_path: Path) -> None:
    tensors = {name: torch.randn(p.shape) for name, p in Model().named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = CheckpointWeights(_stacked(), open_checkpoint(tmp_path))
    for name in PARTS:
        wanted = _joined(tensors, name)
        out = torch.empty_like(wanted)
        source.check([f"mlp.experts.{name}"])
        source.fill(f"mlp.experts.{name}", out)
        assert torch.equal(out, wanted)


def test_random_ones_are_those_of_single_experts() -> None:
    plain, stacked = Model(), _stacked()
    source = DummyWeights(7, parts_of(stacked))
    for name, parameter in plain.named_parameters():
        source.fill(name, parameter.data)
    tensors = {name: p.data for name, p in plain.named_parameters()}
    for name in PARTS:
        out = torch.empty_like(_joined(tensors, name))
        source.fill(f"mlp.experts.{name}", out)
        assert torch.equal(out, _joined(tensors, name))


def test_adapters_find_the_linears_of_single_experts() -> None:
    described = describe_parameters(_stacked(), {})
    assert not described.is_plain
    assert described.experts == {"mlp.experts.w1_w3": ("mlp.experts.{}.w1", "mlp.experts.{}.w3")}
