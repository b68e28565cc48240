"""`fuse_experts`: routed experts absorb the activation between their linears."""

from __future__ import annotations

from torch import fx

from llmc.kernels.act_mul import act_mul
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    calls,
    is_call,
    only_user,
    replace,
    set_arguments,
    update_val,
)

EXPERTS = (expert_linear.overload, quantized_expert_linear.overload)


@graph_pass()
def fuse_experts(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Run fewer, longer kernels around a layer's routed experts.

    Not exact: sums are rounded once instead of after every op.

    Before:
        a = llmc.act_mul(llmc.expert_linear(x, w, b, expert, False), "silu")
    After:
        a = llmc.expert_linear(x, w, b, expert, False, None, None, "silu")
    and in the same way with llmc.quantized_expert_linear.
    """
    if unwanted is not None:
        return [unwanted]
    for node in calls(gm.graph, act_mul.overload):
        _take_activation(node)
    return []


def _take_activation(node: fx.Node) -> None:
    given = arguments(node)
    linear = given.gate_up
    if is_call(linear, *EXPERTS) and only_user(linear) is node:
        set_arguments(linear, act=given.act)
        update_val(linear)
        replace(node, linear)
