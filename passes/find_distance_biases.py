"""`find_distance_biases`: a bias that a model looks up for every pair of tokens, by distance.

Some models compute, for each token, a number for every distance to the keys before it, and add
these numbers to the attention scores. The keys of a step are paged, so the numbers are passed to
attention, which looks up those of the keys that it reads. To prove which numbers the model's code
looks up, it is run for more tokens than there are distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.kernels.attention import attention
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    operands,
    set_arguments,
    val,
)
from llmc.passes.evaluate import NotEvaluable, evaluate, token_counts
from llmc.passes.find_indexers import num_tokens

_MORE = 16  # probe with this many more tokens than there are distances


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """How a bias [1, H, T, T] is computed from numbers [1, H, T, E]."""

    numbers: fx.Node
    index: fx.Node  # [1, H, T, T]: the number of each pair
    hidden: fx.Node | None  # mask of pairs whose bias is 0 instead; can be broadcast
    after: tuple[fx.Node, ...]  # ops applied to the result, in order: casts, factors per query


@graph_pass(required=True)
def find_distance_biases(gm: fx.GraphModule) -> Notes:
    """Pass numbers that the model looks up by distance to attention, which looks them up itself.

    A bias may be cast, and multiplied by a factor for each query; the same is then done to the
    numbers. Raises CompileError for any other bias: paged attention does not support it.

    Before:
        b [1, H, T, T] = aten.masked_fill(aten.gather(x [1, H, T, E], -1, distance), far, 0)
        o = llmc.attention(q [1, H, T, D], k, v, ..., distance_bias=b)
    After:
        o = llmc.attention(q [1, H, T, D], k, v, ..., distance_bias=x)
    """
    graph = gm.graph
    notes = []
    for marker in calls(graph, attention.overload):
        bias = arguments(marker).distance_bias
        if bias is None or isinstance(val(bias).shape[3], int):  # numbers for distances already
            continue
        try:
            found = _find(bias)
            _prove(graph, found, arguments(marker).window)
        except (NotEvaluable, RuntimeError, IndexError) as e:
            raise CompileError(
                f"the model adds a bias to the scores of {marker.name} that its tokens do not look "
                f"up by distance ({' '.join(str(e).split())[:200]}), which llmc can't page"
            ) from e
        with graph.inserting_before(marker):
            set_arguments(marker, distance_bias=_of_numbers(graph, found))
        notes.append(f"{marker.name}: a bias for {_extent(found)} distances")
    return notes


def _extent(found: _Lookup) -> int:
    return int(val(found.numbers).shape[3])


def _find(bias: fx.Node) -> _Lookup:
    """Trace a bias back to the numbers it is looked up in; raises NotEvaluable if that fails."""
    after: list[fx.Node] = []
    hidden: fx.Node | None = None
    node = bias
    while not is_call(node, aten.gather.default):
        if is_call(node, aten.masked_fill.Scalar) and hidden is None and not node.args[2]:
            hidden = arguments(node).mask
        elif is_call(node, *CASTS) or (is_call(node, aten.mul.Tensor) and _factor(node)):
            after.insert(0, node)
        else:
            raise NotEvaluable(f"it is computed by {node.target}")
        node = _scaled(node) if is_call(node, aten.mul.Tensor) else node.args[0]  # type: ignore
    lookup = arguments(node)
    shape = val(lookup.self).shape
    sizes = [str(size) for size in val(bias).shape]
    if lookup.dim not in (-1, 3) or [str(n) for n in shape[:3]] != sizes[:3]:
        raise NotEvaluable("it is not looked up in numbers of each token and head")
    if not isinstance(shape[3], int):
        raise NotEvaluable("the number of its distances depends on the number of tokens")
    return _Lookup(numbers=lookup.self, index=lookup.index, hidden=hidden, after=tuple(after))


def _factor(product: fx.Node) -> fx.Node | None:
    """The factor of a product that has one number for each query, in the dimensions of a bias; None
    if there is none."""
    for factor, scaled in operands(product):
        if isinstance(factor, fx.Node) and isinstance(scaled, fx.Node):
            shape = val(factor).shape
            if len(shape) == 4 and shape[3] == 1 and val(scaled).dim() == 4:
                return factor
    return None


def _scaled(product: fx.Node) -> fx.Node:
    a, b = product.args[:2]
    return b if _factor(product) is a else a  # type: ignore[return-value]


def _prove(graph: fx.Graph, found: _Lookup, window: int) -> None:
    """Raise NotEvaluable unless each visible key gets the number of its distance, and keys beyond
    the last distance get none."""
    extent = _extent(found)
    # the code was traced for this many tokens, and can depend on their number
    tokens = max(extent + _MORE, int(num_tokens(found.index).node.hint))
    counts = token_counts(graph, tokens)
    place = torch.arange(tokens)
    distance = place[:, None] - place[None, :]
    shown = (distance >= 0) & (distance < window if window else True)
    near = distance < extent
    index = evaluate(graph, found.index, tokens, counts)
    hidden = torch.zeros(1, dtype=torch.bool)
    if found.hidden is not None:
        hidden = evaluate(graph, found.hidden, tokens, counts)
    hidden = hidden.expand(1, 1, tokens, tokens)
    if not torch.where(shown & near, (index == distance) & ~hidden, True).all():
        raise NotEvaluable("other numbers are looked up")
    if not torch.where(shown & ~near, hidden, True).all():
        raise NotEvaluable("keys beyond the last distance get a number too")


def _of_numbers(graph: fx.Graph, found: _Lookup) -> fx.Node:
    """The numbers, cast and multiplied as the bias was: [1, H, T, E]."""
    made = found.numbers
    for node in found.after:
        if is_call(node, aten.mul.Tensor):
            made = emit(graph, aten.mul.Tensor, made, _factor(node))
        else:
            made = emit(graph, node.target, made, *node.args[1:], **node.kwargs)
    return made
