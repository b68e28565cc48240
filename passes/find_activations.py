"""`find_activations`: activations that a model spells out become torch's own ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import CASTS, aten, calls, is_call, only_user, replace, same_shape, val
from llmc.passes.evaluate import evaluate
from llmc.passes.inputs import ConstantInput, input_of

# Function that an activation is spelled with -> torch's op for it, and its arguments.
_SPELLED: dict[Any, tuple[Any, dict[str, Any]]] = {
    aten.tanh.default: (aten.gelu.default, {"approximate": "tanh"}),
    aten.erf.default: (aten.gelu.default, {}),
    aten.sigmoid.default: (aten.silu.default, {}),
}
_ARITHMETIC = (
    aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor,
    aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.square.default,
    aten.reciprocal.default, aten.sqrt.default, *CASTS,
)  # fmt: skip
_POINTS = torch.linspace(-12, 12, 193, dtype=torch.float64)
_STEPS = 6  # from the function to the result or to the argument, in all known spellings


@graph_pass()
def find_activations(gm: fx.GraphModule) -> Notes:
    """Replace arithmetic on one tensor that computes a GELU or a SiLU by torch's op, which reads
    the tensor once. What it computes is measured, so any spelling is found.

    Before:
        cubed = aten.mul(aten.pow(x, 3.0), 0.044715)
        t = aten.tanh(aten.mul(aten.add(x, cubed), 0.7978845608028654))
        y = aten.mul(aten.mul(x, 0.5), aten.add(t, 1.0))
    After:
        y = aten.gelu(x, approximate="tanh")
    """
    graph = gm.graph
    for call in calls(graph, *_SPELLED):
        op, named = _SPELLED[call.target]
        expected = op(_POINTS, **named)
        for result, x in _candidates(call):
            got = evaluate(graph, result, 1, {x: _POINTS}, exact=True)
            is_alike = got.shape == expected.shape
            if is_alike and torch.allclose(got, expected, rtol=1e-6, atol=1e-7):
                with graph.inserting_before(result):
                    activated = graph.call_function(op, (x,), named)
                activated.meta["val"] = val(result)
                replace(result, activated)
                break
    return []


def _candidates(call: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(result, argument) of what may be an activation with this call inside, the last result
    first: it includes casts."""
    arguments: list[fx.Node] = []
    level = [call]
    for _ in range(_STEPS):
        level = [a for node in level if _is_arithmetic(node) for a in node.all_input_nodes]
        level = [a for a in dict.fromkeys(level) if isinstance(a.meta.get("val"), Tensor)]
        arguments += [node for node in level if node not in arguments]
    results: list[fx.Node] = []
    for _ in range(_STEPS):
        user = only_user(results[-1] if results else call)
        if user is None or not is_call(user, *_ARITHMETIC):
            break
        results.append(user)
    for result in reversed(results):
        for x in arguments:
            is_like = same_shape(result, x) and val(result).dtype == val(x).dtype
            if is_like and _reads_only(result, x):
                yield result, x


def _is_arithmetic(node: fx.Node) -> bool:
    return is_call(node, *_ARITHMETIC, *_SPELLED)


def _reads_only(result: fx.Node, x: fx.Node) -> bool:
    """Whether `result` is arithmetic on `x` and numbers alone."""
    seen: set[fx.Node] = set()
    rest = [result]
    while rest:
        node = rest.pop()
        if node is x or node in seen or _is_number(node):
            continue
        if not _is_arithmetic(node):
            return False
        seen.add(node)
        rest += node.all_input_nodes
    return True


def _is_number(node: fx.Node) -> bool:
    role = input_of(node)
    return isinstance(role, ConstantInput) and role.tensor.numel() == 1
