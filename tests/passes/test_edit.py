"""Calls' arguments by name: defaults, keywords, and what a changed call looks like."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from llmc.kernels.paged_attention import paged_attention
from llmc.passes.edit import arguments, aten, emit, positional, set_arguments


def call(target: object, *args: object, **kwargs: object) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, (x, *args), kwargs)  # type: ignore[arg-type]


def test_arguments_have_the_schemas_names_and_defaults() -> None:
    cut = arguments(call(aten.slice.Tensor, 1, 2))
    assert (cut.dim, cut.start, cut.end, cut.step) == (1, 2, None, 1)
    conv = arguments(call(aten.conv1d.default, "w"))
    assert (conv.weight, conv.bias, conv.stride, conv.padding) == ("w", None, [1], [0])
    assert arguments(call(aten.gelu.default, approximate="tanh")).approximate == "tanh"
    item = arguments(call(operator.getitem, 1))
    assert item.source.name == "x" and item.index == 1


def test_a_changed_argument_keeps_its_neighbours() -> None:
    node = call(aten.slice.Tensor, 1)
    set_arguments(node, end=7)
    assert node.args[1:] == (1, None, 7) and node.kwargs == {}
    set_arguments(node, dim=0)
    assert node.args[1:] == (0, None, 7)
    assert positional(node)[1:] == (0, None, 7, 1)
    named = call(aten.slice.Tensor, dim=1, start=3)
    set_arguments(named, end=5)
    assert named.args[1:] == (1, 3, 5) and named.kwargs == {}


def test_keyword_only_arguments_stay_keywords() -> None:
    node = call(aten.add.Tensor, "y", alpha=2)
    set_arguments(node, other="z")
    assert node.args[1:] == ("z",) and node.kwargs == {"alpha": 2}


def test_a_name_that_the_op_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="no positional argument 'width'"):
        set_arguments(call(aten.neg.default), width=3)
    with pytest.raises(TypeError, match="paged_attention takes query, key_cache"):
        paged_attention.bind((1, 2, 3))
    with pytest.raises(TypeError, match="paged_attention takes query"):
        paged_attention.bind(range(12), {"width": 3})


def test_emit_takes_names() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(torch.zeros(2, 6))
    half = emit(graph, aten.slice.Tensor, self=x, dim=1, end=3)
    assert half.args == (x, 1, None, 3) and half.meta["val"].shape == (2, 3)
