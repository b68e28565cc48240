"""`fuse_experts`: fewer kernels around a layer's routed experts."""

from __future__ import annotations

import operator

import torch
from torch import fx

from llmc.kernels.act_mul import act_mul
from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.rms_norm import rms_norm
from llmc.kernels.route import route
from llmc.kernels.sum_expert_linear import sum_expert_linear, sum_quantized_expert_linear
from llmc.passes.base import Notes, graph_pass, writes
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    nodes_between,
    only_user,
    replace,
    reshaped,
    set_arguments,
    through_reshapes,
    update_val,
    val,
)

EXPERTS = (expert_linear.overload, quantized_expert_linear.overload)
_SUMMED = dict(
    zip(EXPERTS, (sum_expert_linear.overload, sum_quantized_expert_linear.overload), strict=True)
)
_GATE = ("act", "limit", "shift", "interleaved")


@graph_pass()
def fuse_experts(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Run a router together with the norm before it, the first linear of the experts together with
    their activation, and the last one together with the sum of each token's results. Everything
    else that reads the norm reads it as before.

    Not exact: a router's sums are rounded once instead of after every op.

    Before:
        z = llmc.rms_norm(x, g, eps, 0.0);  y = aten.reshape(z, [-1, K])
        w, i = llmc.choose_experts(aten.linear(y, r), slot_mapping, 8, True, dtype)
        a = llmc.act_mul(llmc.expert_linear(y, u, b, aten.reshape(i, [-1]), False), "silu")
        z = llmc.sum_experts(llmc.expert_linear(a, d, c, aten.reshape(i, [-1]), False), w, dtype, x)
    After:
        y, w, i = llmc.route(aten.reshape(x, [-1, K]), g, eps, 0.0, r, None, slot_mapping, 8, True,
                             dtype)
        a = llmc.expert_linear(y, u, b, aten.reshape(i, [-1]), False, None, None, "silu")
        z = llmc.sum_expert_linear(a, d, c, aten.reshape(i, [-1]), False, w, dtype, x)
    and in the same way with llmc.quantized_expert_linear. The router can be in float32 where the
    norm is not.
    """
    if unwanted is not None:
        return [unwanted]
    for node in calls(gm.graph, act_mul.overload):
        _take_activation(node)
    for node in calls(gm.graph, choose_experts.overload):
        _take_router(gm.graph, node)
    for node in calls(gm.graph, sum_experts.overload):
        _take_sum(gm.graph, node)
    return []


def _take_activation(node: fx.Node) -> None:
    given = arguments(node)
    linear = given.gate_up
    if is_call(linear, *EXPERTS) and only_user(linear) is node:
        set_arguments(linear, **{name: getattr(given, name) for name in _GATE})
        update_val(linear)
        replace(node, linear)


def _take_sum(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    linear = given.rows
    if not is_call(linear, *EXPERTS) or only_user(linear) is not node:
        return
    product = vars(arguments(linear))
    if product["act"] is not None or any(map(writes, nodes_between(linear, node))):
        return  # what the linear reads might be overwritten before the sum
    with graph.inserting_before(node):
        made = emit(
            graph,
            _SUMMED[linear.target],
            share=given.weight,
            dtype=given.dtype,
            residual=given.residual,
            **{name: value for name, value in product.items() if name not in _GATE},
        )
    replace(node, made)
    graph.erase_node(linear)


def _take_router(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node)
    if not is_call(given.logits, aten.linear.default) or only_user(given.logits) is not node:
        return
    linear = arguments(given.logits)
    normed = through_reshapes(linear.input, aten.flatten.using_ints, *CASTS)
    if not is_call(normed, rms_norm.overload):
        return
    if val(linear.input).dtype not in (val(normed).dtype, torch.float32):
        return
    # what is there before the norm
    early = (linear.weight, linear.bias, given.slot_mapping, given.correction)
    if any(isinstance(source, fx.Node) and source.op != "placeholder" for source in early):
        return
    norm = arguments(normed)
    with graph.inserting_before(normed):
        made = emit(
            graph,
            route.overload,
            x=reshaped(graph, norm.x, val(linear.input).shape),
            norm_weight=norm.weight,
            eps=norm.eps,
            offset=norm.offset,
            router=linear.weight,
            bias=linear.bias,
            slot_mapping=given.slot_mapping,
            count=given.count,
            normalized=given.normalized,
            dtype=given.dtype,
            correction=given.correction,
            score=given.score,
            groups=given.groups,
            kept_groups=given.kept_groups,
            sum_eps=given.sum_eps,
            factor=given.factor,
            shared=given.shared,
            gated=given.gated,
        )
        y, weight, expert = (emit(graph, operator.getitem, made, i) for i in range(3))
        replace_by = reshaped(graph, y, val(normed).shape)
    for user in list(node.users):
        replace(user, (weight, expert)[arguments(user).index])
    graph.erase_node(node)
    graph.erase_node(given.logits)
    replace(normed, replace_by)
