"""`quantize_linears`: linears and routed experts read weights of 4 or 8 bits: quantized while they
load, or as the checkpoint stores them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_embedding import quantized_embedding
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import (
    Format,
    Part,
    Quantization,
    quantization_of,
    quantized_linear,
)
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, only_user, replace, val
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
def quantize_linears(
    gm: fx.GraphModule,
    *,
    format: Format | None,
    kept: Sequence[tuple[str, Quantization]] = (),
) -> Notes:
    """Read a half or a quarter of the bytes. Not exact: the model's numbers change a little.

    Weights that are `kept` in `format`, or with None in any, stay as they are, which is exact;
    so do those of embeddings, whose rows `quantized_embedding` widens when they are looked up.
    The output head, if it is not the embedding's weight too, has 8 bits in every format, since its
    errors are the logits' own; a router is not quantized, since a small error can choose another
    expert.

    Before:
        y = aten.linear(x, w, b)
    After:
        y = llmc.quantized_linear(x, w in 4 or 8 bits, its scales, its zeros or None, b,
                                  its minimums)
    and llmc.expert_linear becomes llmc.quantized_expert_linear in the same way.
    """
    formats = dict(kept)
    if format is None and not formats:
        return ["no --quantization was asked for"]
    graph = gm.graph
    left: Counter[str] = Counter()
    for node in calls(graph, aten.linear.default):
        given = arguments(node)
        weight = given.weight
        to, reason = _kept_format(weight, formats)
        is_kept = to is not None and format in (None, to.format)
        if format is not None and not is_kept:
            to, reason = _new_format(node, weight, format)
        if to is None:
            left[reason] += 1
            continue
        assert isinstance(weight, fx.Node)
        with graph.inserting_before(node):
            parts = _low_bit(graph, weight, to, kept=is_kept)
            fast = emit(graph, quantized_linear.overload, x=given.input, **parts, bias=given.bias)
        replace(node, fast)
    for node in calls(graph, aten.embedding.default):
        _keep_embedding(node, formats, format)
    for node in calls(graph, expert_linear.overload):
        reason = _quantize_experts(node, formats, format)
        if reason:
            left[reason] += 1
    return [f"{count} linears: {reason}" for reason, count in left.items()]


def _quantize_experts(
    node: fx.Node, kept: Mapping[str, Quantization], format: Format | None
) -> str:
    """Rewrite a call of `expert_linear`; -> why it was not, or ""."""
    given = arguments(node)
    weight = given.weight
    to, reason = _kept_format(weight, kept)
    if to is not None and to.transposed != given.transposed:
        to, reason = None, "experts are stored in another order than the model has them"
    is_kept = to is not None and format in (None, to.format)
    if format is not None and not is_kept:
        role = input_of(weight)
        if not isinstance(role, WeightInput) or role.quantized or len(role.parts) != 1:
            return "the weight is computed"
        if only_user(weight) is None:
            return "the weight is shared with another op, which needs it plain"
        size = _size(weight, given.transposed)
        to = quantization_of(format, *size[1:])
        if to is None:
            return f"{size[1]} channels of {size[2]} inputs are no whole blocks of 16 and 32"
        to = dataclasses.replace(to, transposed=given.transposed)
    if to is None:
        return reason
    graph = node.graph
    with graph.inserting_before(node):
        parts = _low_bit(graph, weight, to, kept=is_kept)
        fast = emit(
            graph,
            quantized_expert_linear.overload,
            x=given.x,
            **parts,
            bias=given.bias,
            expert=given.expert,
        )
    replace(node, fast)
    return ""


def _size(weight: fx.Node, transposed: bool) -> tuple[int, ...]:
    """[N, K], or [E, N, K] of experts."""
    *experts, channels, depth = (int(n) for n in val(weight).shape)
    return (*experts, depth, channels) if transposed else (*experts, channels, depth)


def _new_format(node: fx.Node, weight: Any, format: Format) -> tuple[Quantization | None, str]:
    """How a weight is quantized, or why it is not."""
    reason = _why_not(node, weight, format)
    if reason:
        return None, reason
    low = "int8" if format == "int4" and _is_head(node) else format
    return quantization_of(low, *(int(n) for n in val(weight).shape)), ""


def _kept_format(weight: Any, kept: Mapping[str, Quantization]) -> tuple[Quantization | None, str]:
    """How all parts of a weight are stored, or why it is not taken as it is."""
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.quantized or role.transposed:
        return None, "the weight is computed"
    formats = {kept.get(part) for part in role.parts}
    format = formats.pop()
    if formats:
        return None, "merged weights are stored in different ways, so they are widened"
    if format is None:
        return None, "stored in full, or in a way that the op can't take exactly"
    if not all(_reads_bits(user, weight) for user in weight.users):
        return None, "the weight is shared with another op, which needs it plain"
    return format, ""


def _reads_bits(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a user of a weight can have it in few bits."""
    if is_call(node, aten.linear.default, expert_linear.overload):
        return arguments(node).weight is weight
    return is_call(node, aten.embedding.default)


def _keep_embedding(node: fx.Node, kept: Mapping[str, Quantization], format: Format | None) -> None:
    """Rows of a weight that is stored in few bits are widened when they are looked up."""
    given = arguments(node)
    weight = given.weight
    to, _ = _kept_format(weight, kept)
    if to is None or format not in (None, to.format):
        return
    assert isinstance(weight, fx.Node)
    if any(is_call(user, aten.linear.default) for user in weight.users):
        return  # which needs it plain
    graph = node.graph
    with graph.inserting_before(node):
        parts = _low_bit(graph, weight, to, kept=True)
        dtype = val(node).dtype
        fast = emit(graph, quantized_embedding.overload, ids=given.indices, **parts, dtype=dtype)
    replace(node, fast)


def _low_bit(
    graph: fx.Graph, weight: fx.Node, to: Quantization, *, kept: bool
) -> dict[Part, fx.Node | None]:
    """Placeholders of the quantized weight, its scales, its zeros and minimums, if it has any."""
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    size = _size(weight, to.transposed)
    nodes: dict[Part, fx.Node | None] = {}
    parts: tuple[Part, ...] = ("weight", "scale", "zero", "minimum")
    for part in parts:
        if part not in to.dtypes:
            nodes[part] = None
            continue
        fake = val(weight).new_empty(to.shape(part, *size), dtype=to.dtypes[part])
        low = dataclasses.replace(role, quantized=QuantizedPart(to=to, part=part, kept=kept))
        nodes[part] = add_input(graph, f"{weight.name}_{to.format}_{part}", low, fake)
    return nodes


def _why_not(node: fx.Node, weight: Any, format: Format) -> str | None:
    role = input_of(weight)
    if not isinstance(role, WeightInput) or role.quantized:
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
    source = arguments(node).input
    if not is_call(source, aten.index_select.default):
        return False
    return input_of(arguments(source).index) == StepInput(name="logits_index")


def _is_router(node: fx.Node) -> bool:
    """Whether the largest of a linear's outputs are picked."""
    for user in node.users:
        if is_call(user, aten.topk.default):
            return True
        if is_call(user, *_ROUTING) and _is_router(user):
            return True
    return False
