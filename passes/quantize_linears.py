"""`quantize_linears`: weights of linears are held in 4 or 8 bits, and quantized while they load."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch import fx

from llmc.kernels.quantized_linear import Format, Part, quantization_of, quantized_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import aten, calls, emit, is_call, only_user, replace, val
from llmc.passes.inputs import QuantizedPart, StepInput, WeightInput, add_input, input_of

# Ops between a router and its choice of experts.
_ROUTING = (
    aten.softmax.int,
    aten._softmax.default,
    aten.sigmoid.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.view.default,
    aten.reshape.default,
    aten.add.Tensor,
)


@graph_pass(changes_model=True)
def quantize_linears(gm: fx.GraphModule, *, format: Format | None) -> Notes:
    """Read a half or a quarter of the bytes. Not exact: the model's numbers change a little.

    None leaves the weights as they are. The output head, if it is not the embedding's weight too,
    has 8 bits in every format, since its errors are the logits' own; a router is left alone, since
    a small error can choose another expert.

    Before:
        y = aten.linear(x, w, b)
    After:
        y = llmc.quantized_linear(x, w in 4 or 8 bits, its scales, None, b)
    """
    if format is None:
        return ["no --quantization was asked for"]
    graph = gm.graph
    left: Counter[str] = Counter()
    for node in calls(graph, aten.linear.default):
        x, weight, bias = [*node.args, None][:3]
        reason = _why_not(node, weight, format)
        if reason:
            left[reason] += 1
            continue
        assert isinstance(weight, fx.Node)
        low = "int8" if format == "int4" and _is_head(node) else format
        with graph.inserting_before(node):
            parts = _low_bit(graph, weight, low)
            fast = emit(graph, quantized_linear.overload, x, *parts, None, bias)
        replace(node, fast)
    experts = sum("expert_linear" in str(n.target) for n in graph.nodes if n.op == "call_function")
    if experts:
        left["routed experts stay as they are stored"] += experts
    return [f"{count} linears: {reason}" for reason, count in left.items()]


def _low_bit(graph: fx.Graph, weight: fx.Node, format: Format) -> list[fx.Node]:
    """Placeholders of the quantized weight and of its scales."""
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    channels, depth = (int(n) for n in val(weight).shape)
    to = quantization_of(format, channels, depth)
    assert to is not None, "the shape was checked"
    nodes = []
    parts: tuple[Part, ...] = ("weight", "scale")
    for part in parts:
        dtype = to.dtype if part == "weight" else to.scale_dtype
        fake = val(weight).new_empty(to.shape(part, channels, depth), dtype=dtype)
        low = dataclasses.replace(role, quantized=QuantizedPart(to=to, part=part))
        nodes.append(add_input(graph, f"{weight.name}_{format}_{part}", low, fake))
    return nodes


def _why_not(node: fx.Node, weight: Any, format: Format) -> str | None:
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.packed or role.quantized:
        return "the weight is computed"
    if only_user(weight) is None:
        return "the weight is shared with another op (tied embedding), which needs it plain"
    channels, depth = (int(n) for n in val(weight).shape)
    if quantization_of(format, channels, depth) is None:
        return f"{channels} channels of {depth} inputs are no whole blocks of 16 and 32"
    if _is_router(node):
        return "a router's choice would change with small errors"
    return None


def _is_head(node: fx.Node) -> bool:
    """Whether a linear reads the rows that `last_token_logits` selected."""
    source = node.args[0]
    if not is_call(source, aten.index_select.default):
        return False
    return input_of(source.args[2]) == StepInput(name="logits_index")  # type: ignore[union-attr]


def _is_router(node: fx.Node) -> bool:
    """Whether the largest of a linear's outputs are picked."""
    for user in node.users:
        if is_call(user, aten.topk.default):
            return True
        if is_call(user, *_ROUTING) and _is_router(user):
            return True
    return False
