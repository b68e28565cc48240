"""`last_token_logits`: the output head runs only on the rows that will be sampled, not all T."""

from __future__ import annotations

from torch import fx

from llmc.errors import CompileError
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    emit,
    is_call,
    only_user,
    set_arguments,
    update_val,
    val,
)
from llmc.passes.inputs import ConstantInput, WeightInput, input_of, step_input

# Pointwise ops allowed between the head and the output; logits may also be cut off at the end.
_POINTWISE = (
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
    aten.tanh.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.clamp.default,
)


@graph_pass(required=True)
def last_token_logits(gm: fx.GraphModule) -> Notes:
    """Before the output head, select the rows that will be sampled.

    Before:
        logits [1, T, V] = pointwise(aten.linear(hidden [1, T, N], head))
    After:
        rows = aten.index_select(hidden, 1, logits_index [S])
        logits [S, V] = pointwise(aten.linear(rows, head))
    """
    graph = gm.graph
    output = graph.output_node()
    logits = output.args[0]
    chain: list[fx.Node] = []
    node = logits
    while (inner := _only_logits(node)) is not None:
        assert isinstance(node, fx.Node)
        chain.append(node)
        node = inner
    assert isinstance(logits, fx.Node) and isinstance(node, fx.Node)
    index = step_input(graph, "logits_index")
    head = is_call(node, aten.linear.default) and only_user(node) is not None
    source = arguments(node).input if head else logits
    if not isinstance(source, fx.Node) or val(source).dim() != 3:
        raise CompileError("the model's logits are not made per token, so rows can't be selected")
    with graph.inserting_before(node if head else output):
        rows = emit(graph, aten.index_select.default, source, 1, index)
    if head:
        set_arguments(node, input=rows)
        for changed in (node, *reversed(chain)):
            update_val(changed)
        rows = logits
    with graph.inserting_before(output):
        flat = emit(graph, aten.squeeze.dim, rows, 0)
    output.args = (flat,)
    return [] if head else ["no linear at the end: rows are selected from the logits"]


def _only_logits(node: object) -> fx.Node | None:
    """The input of a pointwise op, if everything else that it reads is weights and constants, and
    nothing else reads its result.

    Another operand that is computed from the tokens has T rows, which would not match the selected
    rows; neither would what is written to a view of the logits.
    """
    if not isinstance(node, fx.Node):
        return None
    if not is_call(node, *_POINTWISE) and not _keeps_tokens(node):
        return None
    if only_user(node) is None:
        return None
    sources = [
        n for n in node.all_input_nodes if not isinstance(input_of(n), WeightInput | ConstantInput)
    ]
    return sources[0] if len(sources) == 1 else None


def _keeps_tokens(node: fx.Node) -> bool:
    """Whether it slices each token's logits and keeps all tokens."""
    return is_call(node, aten.slice.Tensor) and arguments(node).dim in (-1, val(node).dim() - 1)
