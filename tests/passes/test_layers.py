"""Which layer a node belongs to, and the hidden state that leaves a layer."""

from __future__ import annotations

import pytest
import torch
from shared_captures import capture_once
from tiny_configs import tiny_config
from tiny_layer import layer
from tiny_models import FAMILIES, make_config

from llmc.compiler.build import build
from llmc.errors import CompileError
from llmc.passes.base import run_passes
from llmc.passes.layers import find_layers, layer_list, layer_outputs
from llmc.passes.options import PipelineOptions
from llmc.passes.pipeline import pipeline

# One of each shape of residual stream: plain, post-norm, parallel, with experts, with LayerNorm.
_SHAPES = ("llama", "gemma2", "gpt_neox", "mixtral", "gpt2")


def test_the_layers_are_the_longest_numbered_list() -> None:
    names = ["embed.weight", *(f"model.layers.{i}.experts.{j}.w" for i in (0, 2) for j in (0, 1))]
    assert layer_list(names) == ("model.layers", 3)
    assert layer_list(["embed.weight"]) == ("", 0)


@pytest.mark.parametrize("family", _SHAPES)
def test_the_output_of_each_layer_is_found(family: str) -> None:
    assert family in FAMILIES
    built = build(make_config(family), torch.float32)
    graph = capture_once(built, torch.device("cpu")).graph.graph
    outputs = layer_outputs(graph)
    layers = find_layers(graph)
    assert layers.count == 2
    for i, node in enumerate(outputs):
        assert node.meta["val"].dim() == 3 and node.meta["val"].shape[2] == 32
        assert layers.of[node] == i
        assert str(node.target) == "aten.add.Tensor", "the residual sum"
    numbers = [layers.of[n] for n in graph.nodes if n.op == "call_function"]
    assert numbers == sorted(numbers), "layers follow one another"
    assert set(numbers) == {-1, 0, 1, 2}


def test_a_norm_without_weights_belongs_to_what_follows() -> None:
    built = build(tiny_config("olmo"), torch.float32)
    outputs = layer_outputs(capture_once(built, torch.device("cpu")).graph.graph)
    assert [str(node.target) for node in outputs] == ["aten.add.Tensor"] * 2


def test_a_graph_without_layers_has_no_output_of_one() -> None:
    with pytest.raises(CompileError, match="no single value leaves layer 0"):
        layer_outputs(layer().graph)


def test_fusions_leave_every_layer_its_attention() -> None:
    """Behind the fusions the residual sum belongs to the next norm, but layers stay apart."""
    built = build(make_config("llama"), torch.float32)
    graph = capture_once(built, torch.device("cpu")).graph
    passes = pipeline(PipelineOptions(block_size=4, max_positions=64, device_type="cpu"))
    fused, _ = run_passes(graph, passes)
    layers = find_layers(fused.graph)
    attention = [layers.of[n] for n in fused.graph.nodes if "paged_attention" in str(n.target)]
    assert attention == [0, 1]
