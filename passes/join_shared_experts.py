"""`join_shared_experts`: the experts that every token has become the last of those it chooses."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.kernels.act_mul import act_mul, activate
from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.quantized_linear import quantized_linear
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    arguments,
    aten,
    calls,
    is_call,
    only_user,
    operands,
    replace,
    reshaped,
    set_arguments,
    through_reshapes,
    update_below,
    update_val,
    val,
)
from llmc.passes.fuse_routers import add_residual
from llmc.passes.inputs import Shard, WeightInput, add_input, input_of
from llmc.passes.share_routing import repeated

_EXPERTS = (expert_linear.overload, quantized_expert_linear.overload)
_LINEARS = (aten.linear.default, quantized_linear.overload)
_WEIGHTS = ("weight", "scale", "zero", "minimum")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The two linears of a layer's experts, or of its shared one, and the values that they read."""

    up: fx.Node
    down: fx.Node
    act: fx.Node
    x: fx.Node
    gate: fx.Node | None = None  # logits, of whose sigmoid the result is a multiple

    def weights(self) -> list[dict[str, fx.Node]]:
        """The tensors of each linear's weight."""
        return [
            {name: node for name in _WEIGHTS if (node := getattr(arguments(linear), name, None))}
            for linear in (self.up, self.down)
        ]


@graph_pass()
def join_shared_experts(gm: fx.GraphModule, *, unwanted: str | None = None) -> Notes:
    """Compute a layer's shared expert by the same linears as the routed ones, where its size, its
    activation and the format of its weights are theirs. Its result is no longer rounded before it
    is added, and tokens that only pad a step have none. A shared expert of a multiple of their size
    becomes as many experts.

    Before:
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype)
        a = llmc.act_mul(llmc.expert_linear(y, u, None, aten.reshape(i, [-1]), False), "silu")
        z = llmc.sum_experts(llmc.expert_linear(a, d, None, aten.reshape(i, [-1]), False), w, dtype)
        z = aten.add(z, aten.linear(llmc.act_mul(aten.linear(y, u1), "silu"), d1))
    After:
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype, shared=1)
        a = llmc.act_mul(llmc.expert_linear(y, cat(u, u1), None, aten.reshape(i, [-1]), False),
                         "silu")
        z = llmc.sum_experts(
            llmc.expert_linear(a, cat(d, d1), None, aten.reshape(i, [-1]), False), w, dtype)
    and in the same way with llmc.quantized_expert_linear and llmc.quantized_linear.

    Before, if the shared expert has a gate:
        logits, g = aten.split_with_sizes(aten.linear(y, cat(r, r1)), [E, 1], -1)
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype)
        z = aten.add(z, aten.mul(aten.sigmoid(g), aten.linear(a1, d1)))
    After:
        w, i = llmc.choose_experts(aten.linear(y, cat(r, r1)), slot_mapping, 8, True, dtype,
                                   shared=1, gated=True)
    """
    if unwanted is not None:
        return [unwanted]
    left = 0
    for node in calls(gm.graph, sum_experts.overload):
        both, shared = _added(node)
        if both is None or shared is None:
            continue
        routed = _routed(node)
        if routed is None or not _join(gm.graph, node, routed, shared):
            left += 1
            continue
        with gm.graph.inserting_before(both):
            total = reshaped(gm.graph, node, val(both).shape)
        replace(both, total)
        if arguments(node).residual is None:
            add_residual(gm.graph, node, absorbs_norms=True)
    return [f"{left} shared experts differ from the routed ones"] if left else []


def _added(total: fx.Node) -> tuple[fx.Node | None, _Layer | None]:
    """The sum of the routed experts' results and the shared one's, and the latter."""
    at = total
    while (user := only_user(at)) is not None and through_reshapes(user) is not user:
        at = user
    if user is None or not is_call(user, aten.add.Tensor) or user.kwargs:
        return None, None
    if val(user).dtype != val(total).dtype:
        return None, None
    other: Any = next((other for own, other in operands(user) if own is at), None)
    down, gate = through_reshapes(other), None
    if is_call(down, aten.mul.Tensor):
        for factor, rest in operands(down):
            factor = through_reshapes(factor)
            if is_call(factor, aten.sigmoid.default) and is_call(rest, *_LINEARS):
                down, gate = rest, through_reshapes(arguments(factor).self)
                break
    if not is_call(down, *_LINEARS) or None in (only_user(down), only_user(other)):
        return None, None
    return user, _layer(down, _LINEARS, gate)


def _routed(total: fx.Node) -> _Layer | None:
    down = arguments(total).rows
    if not is_call(down, *_EXPERTS) or only_user(down) is not total:
        return None
    found = _layer(down, _EXPERTS)
    if found is None:
        return None
    linears = [arguments(linear) for linear in (found.up, found.down)]
    is_plain = all(given.order is None and given.act is None for given in linears)
    return found if is_plain and not any(getattr(g, "transposed", 0) for g in linears) else None


def _layer(down: fx.Node, linears: tuple[Any, ...], gate: fx.Node | None = None) -> _Layer | None:
    """Two linears without a bias, with an activation between them."""
    act = through_reshapes(_x(down))
    if not is_call(act, act_mul.overload, activate.overload) or only_user(act) is None:
        return None
    up = through_reshapes(act.args[0])
    if not is_call(up, *linears) or up.target is not down.target or only_user(up) is None:
        return None
    if any(arguments(linear).bias is not None for linear in (up, down)):
        return None
    return _Layer(up=up, down=down, act=act, x=_x(up), gate=gate)


def _x(linear: fx.Node) -> Any:
    return arguments(linear).input if is_call(linear, aten.linear.default) else arguments(linear).x


def _join(graph: fx.Graph, total: fx.Node, routed: _Layer, shared: _Layer) -> bool:
    chosen = _choice(total, routed)
    x = repeated(routed.x) or routed.x
    flatten = aten.flatten.using_ints
    if chosen is None or _LINEARS.index(shared.up.target) != _EXPERTS.index(routed.up.target):
        return False
    if through_reshapes(x, flatten) is not through_reshapes(shared.x, flatten):
        return False
    if routed.act.target is not shared.act.target or routed.act.args[1:] != shared.act.args[1:]:
        return False
    if [_bits(n) for n in (routed.up, routed.down)] != [_bits(n) for n in (shared.up, shared.down)]:
        return False
    recipes = _recipes(routed, shared)
    logits = arguments(chosen).logits if shared.gate is None else _both(chosen, shared.gate)
    if recipes is None or logits is None or (shared.gate is not None and recipes[0] > 1):
        return False
    count, made = recipes
    for linear, parts in zip((routed.up, routed.down), made, strict=True):
        changed = {}
        for name, recipe in parts.items():
            old = getattr(arguments(linear), name)
            experts, *size = val(old).shape
            fake = val(old).new_empty(experts + count, *size)
            changed[name] = add_input(graph, f"{old.name}_joined", recipe, fake)
        set_arguments(linear, **changed)
    set_arguments(routed.up, x=x)
    set_arguments(chosen, logits=logits, shared=count, gated=shared.gate is not None)
    update_val(chosen)
    update_below(chosen)
    return True


def _bits(linear: fx.Node) -> int | None:
    return getattr(arguments(linear), "x_bits", None)


def _both(chosen: fx.Node, gate: fx.Node) -> fx.Node | None:
    """The logits [T, E + 1] of which the last are the gate and the others those of the choice."""
    parts = [arguments(chosen).logits, gate]
    if not all(is_call(part, operator.getitem) for part in parts):
        return None
    numbers, sources = zip(*((arguments(p).index, arguments(p).source) for p in parts), strict=True)
    split = sources[0]
    if sources[1] is not split or not is_call(split, aten.split_with_sizes.default):
        return None
    given = arguments(split)
    whole: fx.Node = given.self
    is_whole = numbers == (0, 1) and list(given.split_sizes)[1:] == [1]
    return whole if is_whole and val(whole).dim() == 2 else None


def _choice(total: fx.Node, routed: _Layer) -> fx.Node | None:
    """The choice of experts, if nothing but these linears and this sum reads it."""
    weight = arguments(total).weight
    if not is_call(weight, operator.getitem) or only_user(weight) is not total:
        return None
    chosen: fx.Node = arguments(weight).source
    if not is_call(chosen, choose_experts.overload) or arguments(chosen).shared:
        return None
    at = [user for user in chosen.users if user is not weight]
    while at:
        node = at.pop()
        if is_call(node, operator.getitem, aten.reshape.default, aten.view.default):
            at += node.users
        elif node not in (routed.up, routed.down):
            return None
    return chosen


def _recipes(routed: _Layer, shared: _Layer) -> tuple[int, list[dict[str, WeightInput]]] | None:
    """How many experts the shared one consists of, and the recipes of each linear's tensors."""
    width = val(arguments(routed.up).weight).shape[1]
    count, rest = divmod(int(val(arguments(shared.up).weight).shape[0]), int(width))
    is_quantized = is_call(routed.up, quantized_expert_linear.overload)
    alternates = getattr(arguments(routed.act), "interleaved", False)
    if rest or not count or (count > 1 and (is_quantized or alternates)):
        return None
    made = []
    for of, one, dim in zip(routed.weights(), shared.weights(), (0, 1), strict=True):
        if of.keys() != one.keys():
            return None
        gates = 2 if dim == 0 and is_call(routed.act, act_mul.overload) else 1
        recipes = {name: _recipe(of[name], one[name], count, dim, gates) for name in of}
        if None in recipes.values():
            return None
        made.append({name: recipe for name, recipe in recipes.items() if recipe is not None})
    return count, made


def _recipe(stack: fx.Node, one: fx.Node, count: int, dim: int, gates: int) -> WeightInput | None:
    """The experts' weights [E, ...] and then those of `count` more, which are joined along `dim` of
    `one`: there, `gates` times one after the other. None if they have other forms."""
    first, last = input_of(stack), input_of(one)
    if not isinstance(first, WeightInput) or not isinstance(last, WeightInput):
        return None
    if only_user(stack) is None or only_user(one) is None or val(stack).dtype != val(one).dtype:
        return None
    size = list(val(stack).shape[1:])
    size[dim] *= count
    own = WeightInput(parts=last.parts, shards=last.shards, quantized=first.quantized)
    plain = WeightInput(parts=first.parts, shards=first.shards, quantized=first.quantized)
    if list(val(one).shape) != size or own != last or plain != first:
        return None
    pieces = last.pieces
    if count > 1:
        if first.shards or last.shards or len(pieces) > gates:
            return None
        whole = (size[dim] // gates, count)
        sections = (whole,) * (gates // len(pieces))
        shards = [Shard(dim=dim, sections=sections, size=count, rank=i) for i in range(count)]
        pieces = [(part, shard) for shard in shards for part in last.parts]
    pieces = first.pieces + pieces
    given = tuple(shard for _, shard in pieces)
    return dataclasses.replace(
        first, parts=tuple(part for part, _ in pieces), shards=given if any(given) else ()
    )
