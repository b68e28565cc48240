"""`chain_linears`: the linears from one layer's attention to the next one's become one op."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from llmc.kernels.chain_linears import chain_linears as chain_op
from llmc.kernels.fused_linear import add_linear, fused_linear
from llmc.passes.base import Notes, graph_pass, writes
from llmc.passes.edit import arguments, calls, emit, is_call, nodes_between, only_user, replace
from llmc.passes.fuse_linears import sharing_memory


class _Links(NamedTuple):
    """Four linears in a row; the first and the third add to the hidden state, the others read it
    through a norm."""

    first: fx.Node
    up: fx.Node
    down: fx.Node
    last: fx.Node


@graph_pass(on_request=True)
def chain_linears(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Launch two kernels per dense layer of a decode step: attention, and one persistent kernel
    for the linears up to the next attention. The op itself handles few and many rows differently.

    Before:
        llmc.add_linear(h, o, w, None, None, None, 0.0, None)
        a = llmc.fused_linear(h, u, None, g, eps, 0.0, "silu", None)
        llmc.add_linear(h, a, d, None, None, None, 0.0, None)
        qkv = llmc.fused_linear(h, n, None, g2, eps2, 0.0, None, None)
    After:
        qkv = llmc.chain_linears(h, o, w, None, u, None, g, eps, 0.0, "silu", d, None,
                                 n, None, g2, eps2, 0.0)
    """
    if unwanted is not None:
        return [unwanted]
    graph = gm.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    chains, notes = list[_Links](), list[str]()
    for first in calls(graph, add_linear.overload):
        found = _next_readers(first, order)
        if not found or not _is_gated(found[0], first):
            continue  # it is the third of a chain, or not part of one
        links = _Links(first, *found) if len(found) == 3 else None
        reason = "nothing follows its layer" if links is None else _obstacle(links)
        if links is not None and reason is None:
            chains.append(links)
        else:
            notes.append(f"{first.name}: {reason}")
    for links in chains:
        _fuse(graph, links)
    return notes


def _next_readers(first: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The next three calls after `first` that read or change what it adds to, or a view of it."""
    shared = sharing_memory(arguments(first).out)
    readers = {user for one in shared for user in one.users if order[user] > order[first]}
    return sorted(readers, key=order.__getitem__)[:3]


def _is_gated(node: fx.Node, first: fx.Node) -> bool:
    given: Any = arguments(node)
    is_linear = is_call(node, fused_linear.overload) and given.x is arguments(first).out
    return is_linear and given.eps is not None and given.act is not None


def _obstacle(links: _Links) -> str | None:
    """Why the four calls are not a chain, or None."""
    first, up, down, last = (arguments(node) for node in links)
    if not is_call(links.down, add_linear.overload) or down.out is not first.out:
        return "the result of its gated linear is not added to the same tensor"
    if down.x is not links.up or only_user(links.up) is not links.down or up.residual is not None:
        return "its gated linear is read elsewhere"
    if not is_call(links.last, fused_linear.overload) or last.x is not first.out:
        return "its layer's result is read by other ops than a linear"
    if last.eps is None or last.act is not None or last.residual is not None:
        return "the next linear has no norm, or an activation"
    if any(given.eps is not None or given.act is not None for given in (first, down)):
        return "a sum has a norm or an activation"
    between = nodes_between(links.first, links.last)
    if any(node not in links and writes(node) for node in between):
        return "another op writes in between"
    return None


def _fuse(graph: fx.Graph, links: _Links) -> None:
    first, up, down, last = (arguments(node) for node in links)
    with graph.inserting_before(links.last):
        chain = emit(
            graph, chain_op.overload,
            hidden=first.out, x=first.x, weight=first.weight, bias=first.bias,
            up_weight=up.weight, up_bias=up.bias, up_norm=up.norm_weight, up_eps=up.eps,
            up_offset=up.offset, act=up.act, down_weight=down.weight, down_bias=down.bias,
            next_weight=last.weight, next_bias=last.bias, next_norm=last.norm_weight,
            next_eps=last.eps, next_offset=last.offset,
        )  # fmt: skip
    replace(links.last, chain)
    for node in (links.down, links.up, links.first):
        graph.erase_node(node)
