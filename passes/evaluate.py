"""Run a part of a graph that reads no weights, for a chosen number of tokens.

Masks and position biases are computed from positions, sizes and constants. Passes that need to
know what such code computes run it and inspect the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from llmc.passes.edit import aten
from llmc.passes.inputs import ConstantInput, StepInput, WeightInput, input_of, token_input

_CPU = torch.device("cpu")


class NotEvaluable(Exception):
    """The part reads a value that is not known here, or does not compute what was expected."""


def evaluate(
    graph: fx.Graph,
    target: Any,
    tokens: int,
    given: Mapping[fx.Node, Any],
    seed: int = 0,
    *,
    exact: bool = False,
) -> Tensor:
    """Compute `target` on the CPU for one sequence of `tokens` random tokens, drawn with `seed`.

    `given` has the values of nodes that are not to be computed: tensors, or functions that receive
    a callable which computes another node. `exact`: use float64 in place of the graph's float
    dtypes. Raises NotEvaluable if a weight or a state is needed.
    """
    prepared = _on_cpu_exactly if exact else _on_cpu
    env: dict[fx.Node, Any] = {}

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in env:
            env[node] = _given(given[node], value) if node in given else compute(node)
        return env[node]

    def compute(node: fx.Node) -> Any:
        if node.op == "placeholder":
            return prepared(_input(node, tokens, seed))
        if node.target is aten.sym_size.int and not isinstance(value(node.args[0]), Tensor):
            raise NotEvaluable(f"{node.name} is not the size of a tensor")
        args = fx.node.map_aggregate(fx.node.map_arg(node.args, value), prepared)
        kwargs = fx.node.map_aggregate(fx.node.map_arg(node.kwargs, value), prepared)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad():
        result = value(target)
    if not isinstance(result, Tensor):
        raise NotEvaluable(f"{target} is not a tensor")
    return result


def token_counts(graph: fx.Graph, tokens: int) -> dict[fx.Node, Any]:
    """Entries for `given`: every size in the graph that is the number of tokens."""
    count = str(token_input(graph).meta["val"].shape[0])
    sizes = [n for n in graph.nodes if n.target is aten.sym_size.int]
    return dict.fromkeys((n for n in sizes if str(n.meta["val"]) == count), tokens)


def _given(value: Any, compute: Any) -> Any:
    return value(compute) if callable(value) and not isinstance(value, Tensor) else value


def _input(node: fx.Node, tokens: int, seed: int) -> Any:
    role = input_of(node)
    if role == StepInput(name="positions"):
        return torch.arange(tokens)
    if role == StepInput(name="token_ids"):
        return torch.randint(0, 7, (tokens,), generator=torch.Generator().manual_seed(seed))
    if isinstance(role, ConstantInput):
        return role.tensor.to(_CPU)
    raise NotEvaluable(f"it reads {role.parts[0] if isinstance(role, WeightInput) else node.name}")


def _on_cpu(arg: Any) -> Any:
    return _CPU if isinstance(arg, torch.device) else arg


def _on_cpu_exactly(arg: Any) -> Any:
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return torch.float64
    if isinstance(arg, Tensor) and arg.is_floating_point():
        return arg.double()
    return _on_cpu(arg)
