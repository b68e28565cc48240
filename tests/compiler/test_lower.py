"""Lowering: which ops keep a step from being captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from llmc.compiler.lower import gpu_references
from llmc.kernels.act_mul import act_mul


def graph_on(device: str, target: object) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 8, device=device)
    y = graph.call_function(target, (x, "silu"))  # type: ignore[arg-type]
    graph.output(y)
    return graph


def test_references_are_named_where_they_run_on_a_gpu() -> None:
    assert gpu_references(graph_on("cuda", act_mul.overload)) == ("act_mul",)
    assert gpu_references(graph_on("cpu", act_mul.overload)) == ()
    assert gpu_references(graph_on("cuda", torch.ops.aten.relu.default)) == ()
