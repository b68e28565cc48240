"""`order_channels`: the rows of a weight are stored in the order in which its channels are read."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.quantized_linear import quantized_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, is_call, only_user, reshaped, val
from llmc.passes.inputs import WeightInput, add_input, fake_like, input_of

_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
_BY_ROW = ("weight", "scale", "zero", "bias", "minimum")
_MOVES = (
    aten.view.default, aten.reshape.default, aten.cat.default, aten.slice.Tensor, operator.getitem,
)  # fmt: skip


@graph_pass()
def order_channels(gm: fx.GraphModule) -> Notes:
    """Permute the rows of a weight, so that what is cut out of a linear's result lies together.

    A projection that stores its outputs head by head is otherwise copied apart in every step. The
    same for llmc.quantized_linear, with its scales, zeros and minimums; a bias is permuted too.

    Before:
        y [1, T, N] = aten.linear(x, w)
        a [1, T, G, n], b [1, T, G, m] = aten.split_with_sizes(aten.view(y, [1, T, G, -1]), [n, m])
        z = aten.cat([aten.reshape(a, [1, T, G * n]), aten.reshape(b, [1, T, G * m])], -1)
    After:
        z [1, T, N] = aten.linear(x, w with its rows in another order)
    """
    graph = gm.graph
    notes = []
    for linear in calls(graph, aten.linear.default, quantized_linear.overload):
        parts = _parts(linear)
        if parts is None:
            continue
        args, order = dict(vars(arguments(linear))), _ranges(parts)
        if len(order) > 1:
            rows = {name: args[name] for name in _BY_ROW if args.get(name) is not None}
            if any(not _is_movable(weight, linear) for weight in rows.values()):
                notes.append(f"{linear.name}: its weight is computed, or also read elsewhere")
                continue
            for name, weight in rows.items():
                args[name] = _ordered(graph, weight, order)
        _cut(graph, linear, tuple(args.values()), parts)
    return notes


def _is_movable(weight: fx.Node, linear: fx.Node) -> bool:
    return isinstance(input_of(weight), WeightInput) and only_user(weight) is linear


def _parts(linear: fx.Node) -> dict[fx.Node, Tensor] | None:
    """What is read of the result [1, T, N]: the channels of each value [1, T, ...], in its shape
    without the first two dimensions. None if they are not all channels, each once, or if nothing
    is copied now."""
    shape = val(linear).shape
    if len(shape) != 3 or shape[0] != 1 or isinstance(shape[1], int):
        return None
    tokens, width = str(shape[1]), int(shape[2])
    known: dict[fx.Node, Any] = {linear: torch.arange(width).view(1, 1, width)}
    at = linear.next
    while at.op != "output":
        if _moves(at, known, tokens):
            known[at] = _moved(at, known)
        at = at.next
    parts = {
        node: index[0, 0]
        for node, index in known.items()
        if isinstance(index, Tensor) and any(user not in known for user in node.users)
    }
    read = [channel for index in parts.values() for channel in index.reshape(-1).tolist()]
    joined = any(is_call(node, aten.cat.default) for node in known)
    if not joined and all(_is_range(index) for index in parts.values()):
        return None
    return parts if sorted(read) == list(range(width)) else None


def _moves(node: fx.Node, known: dict[fx.Node, Any], tokens: str) -> bool:
    """Whether a call only moves channels whose origin is known, within [1, T, ...]."""
    if not is_call(node, *_MOVES, *_SPLITS):
        return False
    sources = list(arguments(node).tensors) if is_call(node, aten.cat.default) else [node.args[0]]
    if not all(source in known for source in sources):
        return False
    if not is_call(node, *_SPLITS):
        shape = [str(s) for s in val(node).shape]
        if len(shape) < 3 or shape[:2] != ["1", tokens]:
            return False
        if any(not isinstance(s, int) for s in val(node).shape[2:]):
            return False
    if is_call(node, aten.cat.default, aten.slice.Tensor, *_SPLITS):
        rank = val(sources[0]).dim()
        return bool(arguments(node).dim % rank >= 2)
    return True


def _moved(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """A call's result for one token, given the numbers of its channels."""

    def value(arg: fx.Node) -> Any:
        return known.get(arg, 1)  # a size: the number of tokens

    args: Any = fx.node.map_arg(node.args, value)
    kwargs: Any = fx.node.map_arg(node.kwargs, value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_range(index: Tensor) -> bool:
    flat = index.reshape(-1)  # empty if a part, such as experts that are not used, has no channels
    return bool((flat.diff() == 1).all())


def _ranges(parts: dict[fx.Node, Tensor]) -> tuple[tuple[int, int], ...]:
    """The channels of all parts in order, as ranges (start, length)."""
    ranges: list[tuple[int, int]] = []
    for channel in (c for index in parts.values() for c in index.reshape(-1).tolist()):
        if ranges and sum(ranges[-1]) == channel:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((channel, 1))
    return tuple(ranges)


def _ordered(graph: fx.Graph, weight: fx.Node, order: tuple[tuple[int, int], ...]) -> fx.Node:
    role = input_of(weight)
    assert isinstance(role, WeightInput)
    fake = fake_like(weight, *val(weight).shape, dtype=val(weight).dtype)
    wanted = dataclasses.replace(role, order=order)
    return add_input(graph, f"{weight.name}_ordered", wanted, fake)


def _cut(
    graph: fx.Graph, linear: fx.Node, args: tuple[Any, ...], parts: dict[fx.Node, Tensor]
) -> None:
    """Read the parts as ranges of the linear called with `args`, in whose order they come."""
    with graph.inserting_after(linear):
        out = emit(graph, linear.target, *args)
    with graph.inserting_after(out):
        split = emit(
            graph, aten.split_with_sizes.default, out, [i.numel() for i in parts.values()], -1
        )
    at = split
    for i, part in enumerate(parts):
        with graph.inserting_after(at):
            at = item = graph.call_function(operator.getitem, (split, i))
        item.meta["val"] = split.meta["val"][i]
        with graph.inserting_after(at):
            shaped = reshaped(graph, item, val(part).shape)
        at = item if shaped is item else shaped
        part.replace_all_uses_with(shaped)
