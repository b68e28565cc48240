"""`fuse_routers`: choose a token's experts in one op, and add their results in another."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import fx

from llmc.kernels.choose_experts import choose_experts, sum_experts
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_expert_linear import quantized_expert_linear
from llmc.kernels.rms_norm import add_rms_norm, rms_norm
from llmc.passes.base import Notes, graph_pass
from llmc.passes.edit import (
    CASTS,
    arguments,
    aten,
    calls,
    emit,
    is_call,
    items_of,
    only_user,
    operands,
    positional,
    replace,
    same_shape,
    through,
    through_reshapes,
    val,
)
from llmc.passes.find_attention import SOFTMAX
from llmc.passes.inputs import StepInput, input_of

_RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    """How experts are chosen, as `choose_experts` takes it, and the weights of those chosen."""

    logits: fx.Node
    weight: fx.Node
    score: str = "softmax"
    normalized: bool = False
    correction: fx.Node | None = None
    groups: int = 1
    kept_groups: int = 1


@graph_pass()
def fuse_routers(gm: fx.GraphModule, *, absorbs_norms: bool = True) -> Notes:
    """Run a router's softmax or sigmoid and its top-k in one kernel, and the weighted sum of the
    experts in one. Padding tokens choose no expert, so no weight is read for them alone.

    Not exact: both are computed in float32 and rounded once.

    Before:
        v, i = aten.topk(aten.softmax(logits, -1), 8);  w = aten.div(v, aten.sum(v, [-1], True))
        y = llmc.expert_linear(.., aten.reshape(i, [-1]), ..)
        z = aten.sum(aten.mul(aten.reshape(y, [-1, 8, N]), aten.unsqueeze(w, -1)), [1])
    After:
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype)
        y = llmc.expert_linear(.., aten.reshape(i, [-1]), ..)
        z = llmc.sum_experts(y, w, dtype)
    and a residual sum after it becomes part of `sum_experts`, also if what shared experts add comes
    between them; a softmax or sigmoid of the top-k's values is replaced in the same way. Unless
    linears absorb the norms before them, it is what shared experts add that becomes part of it.

    Before, with scores to which a correction is added only for the choice, among the best groups:
        s = aten.sigmoid(logits);  c = aten.add(s, correction)
        g = aten.sum(aten.topk(aten.view(c, [-1, 8, 32]), 2)[0], [-1])
        m = aten.scatter(aten.zeros_like(g), 1, aten.topk(g, 4)[1], 1);  m = <m for each expert>
        i = aten.topk(aten.masked_fill(c, aten.bitwise_not(m), -inf), 8)[1]
        v = aten.gather(s, 1, i);  w = aten.div(v, aten.add(aten.sum(v, [-1], True), 1e-20))
        w = aten.mul(w, 2.5)
    After:
        w, i = llmc.choose_experts(logits, slot_mapping, 8, True, dtype, correction, "sigmoid", 8,
                                   4, 1e-20, 2.5)
    """
    left = 0
    for node in calls(gm.graph, aten.topk.default):
        if _is_router(node):
            found = _find(node)
            if found is None:
                left += 1
            else:
                _choose(gm.graph, node, found)
    for node in calls(gm.graph, aten.sum.dim_IntList):
        _sum(gm.graph, node, absorbs_norms)
    return [f"{left} routers are in no form that choose_experts computes"] if left else []


def _is_router(topk: fx.Node) -> bool:
    """Whether the numbers of the highest values do nothing but choose experts and their weights."""
    index = items_of(topk).get(1)
    if index is None:
        return False
    chosen = [user for user in index.users if not is_call(user, aten.gather.default)]
    return bool(chosen) and all(_only_chooses(user, index) for user in chosen)


def _only_chooses(user: fx.Node, index: fx.Node) -> bool:
    if is_call(user, *_RESHAPES):
        return bool(user.users) and all(_only_chooses(reader, user) for reader in user.users)
    is_linear = is_call(user, expert_linear.overload, quantized_expert_linear.overload)
    return is_linear and arguments(user).expert is index


def _find(topk: fx.Node) -> _Router | None:
    given, items = arguments(topk), items_of(topk)
    if not given.largest or not _is_last(topk, given.dim):
        return None
    values = items.get(0)
    gathers = [user for user in items[1].users if is_call(user, aten.gather.default)]
    if gathers:
        return _corrected(given, gathers[0]) if len(gathers) == 1 and values is None else None
    if values is None:
        return None
    before, after = _scored(given.self), only_user(values)
    if before is not None:
        return _Router(weight=values, **before)
    scored = _scored(after)
    if scored is None or after is None:
        return None
    softmax = scored["score"] == "softmax"  # of the chosen alone
    return _Router(
        weight=after, **{**scored, "logits": _before_casts(given.self)}, normalized=softmax
    )


def _scored(node: Any) -> dict[str, Any] | None:
    """The logits and the kind of a score for each expert, [T, E]."""
    if not is_call(node, *SOFTMAX, aten.sigmoid.default, aten.sqrt.default):
        return None
    source = node.args[0]
    kind = "sigmoid"
    if is_call(node, aten.sqrt.default):
        if not is_call(source, aten.softplus.default) or len(source.args) > 1:
            return None
        kind, source = "sqrt_softplus", source.args[0]
    elif is_call(node, *SOFTMAX):
        if not _is_last(node, arguments(node).dim):
            return None
        kind = "softmax"
    logits = _before_casts(source)
    return {"logits": logits, "score": kind} if val(logits).dim() == 2 else None


def _before_casts(logits: fx.Node) -> fx.Node:
    """The logits before the model's casts: the op itself computes in float32."""
    source: fx.Node = through(logits, *CASTS)
    return source if val(source).dtype.is_floating_point else logits


def _corrected(topk: SimpleNamespace, gather: fx.Node) -> _Router | None:
    """The weights are scores, gathered where scores with a correction are highest."""
    given = arguments(gather)
    scored = _scored(given.self)
    if scored is None or not _is_last(gather, given.dim):
        return None
    found = _grouped(topk.self, topk.k)
    if found is None:
        return None
    ranked, groups, kept_groups = found
    correction = None
    if ranked is not given.self:
        if not is_call(ranked, aten.add.Tensor) or ranked.kwargs:
            return None
        addend = next((other for own, other in operands(ranked) if own is given.self), None)
        experts = [val(given.self).shape[1]]
        forms = (addend, through_reshapes(addend)) if isinstance(addend, fx.Node) else ()
        correction = next((form for form in forms if list(val(form).shape) == experts), None)
        if correction is None:
            return None
    return _Router(
        weight=gather, correction=correction, groups=groups, kept_groups=kept_groups, **scored
    )


def _grouped(ranked: Any, count: int) -> tuple[Any, int, int] | None:
    """The values, and how many groups there are and are kept, if all others are filled."""
    if not is_call(ranked, aten.masked_fill.Scalar):
        return ranked, 1, 1
    given = arguments(ranked)
    if not is_call(given.mask, aten.bitwise_not.default, aten.logical_not.default):
        return None
    repeated = through(given.mask.args[0], *CASTS, *_RESHAPES)
    if not is_call(repeated, aten.expand.default):
        return None
    single = arguments(repeated).self
    if not is_call(single, aten.unsqueeze.default) or arguments(single).dim % 3 != 2:
        return None
    marks = arguments(single).self
    if not is_call(marks, aten.scatter.value) or arguments(marks).value != 1:
        return None
    best = _topk_of(arguments(marks).index, 1)
    if not is_call(arguments(marks).self, aten.zeros_like.default) or best is None:
        return None
    total, kept = arguments(best).self, arguments(best).k
    if not is_call(total, aten.sum.dim_IntList) or list(arguments(total).dim) not in ([-1], [2]):
        return None
    two = _topk_of(arguments(total).self, 0)
    if two is None or arguments(two).k != 2:
        return None
    grouped = arguments(two).self
    if through(grouped, *_RESHAPES) is not given.self or val(grouped).dim() != 3:
        return None
    groups, size = val(grouped).shape[1:]
    if [str(n) for n in val(repeated).shape] != [str(n) for n in val(grouped).shape]:
        return None
    if kept == groups:
        return given.self, 1, 1
    fits = given.value == -math.inf and count <= kept * size
    return (given.self, groups, kept) if fits else None


def _topk_of(item: Any, index: int) -> fx.Node | None:
    """The call that gives the highest values, if `item` is these (0) or their numbers (1)."""
    if not is_call(item, operator.getitem) or arguments(item).index != index:
        return None
    topk: fx.Node = arguments(item).source
    if not is_call(topk, aten.topk.default) or not arguments(topk).largest:
        return None
    return topk if _is_last(topk, arguments(topk).dim) else None


def _choose(graph: fx.Graph, topk: fx.Node, found: _Router) -> None:
    items = items_of(topk)
    old = [found.weight]
    quotient = None if found.normalized else _quotient(found.weight)
    eps, factor = 0.0, 1.0
    if quotient is not None:
        old.append(quotient[0])
        eps = quotient[1]
    scaled = only_user(old[-1])
    if scaled is not None and is_call(scaled, aten.mul.Tensor, aten.mul_.Tensor):
        number = next((b for a, b in operands(scaled) if isinstance(b, int | float)), None)
        if number is not None:
            old.append(scaled)
            factor = float(number)
    cast = _cast(old[-1])
    if cast is not None:
        old.append(cast)
    with graph.inserting_before(topk):
        chosen = emit(
            graph,
            choose_experts.overload,
            logits=found.logits,
            slot_mapping=_slots(graph, found.logits),
            count=arguments(topk).k,
            normalized=found.normalized or quotient is not None,
            dtype=val(old[-1]).dtype,
            correction=found.correction,
            score=found.score,
            groups=found.groups,
            kept_groups=found.kept_groups,
            sum_eps=eps,
            factor=factor,
        )
        weight, index = (emit(graph, operator.getitem, chosen, i) for i in (0, 1))
    old[-1].replace_all_uses_with(weight)
    for node in old[:0:-1]:  # dead, but the quotient is often written in place
        graph.erase_node(node)
    items[1].replace_all_uses_with(index)


def _cast(node: fx.Node) -> fx.Node | None:
    """The conversion of a value to another type of float, if nothing else reads the value."""
    user = only_user(node)
    if user is None or not is_call(user, *CASTS):
        return None
    return user if val(user).dtype.is_floating_point else None


def _quotient(values: fx.Node) -> tuple[fx.Node, float] | None:
    """values / (values.sum(-1, keepdim=True) + eps), and eps, if nothing else reads the values."""
    users = list(values.users)
    for total, quotient in (users, users[::-1]) if len(users) == 2 else ():
        if not is_call(total, aten.sum.dim_IntList):
            continue
        given, divisor = arguments(total), total
        eps: Any = 0.0
        added = only_user(total)
        sums = (aten.add.Tensor, aten.add_.Tensor)
        if added is not None and is_call(added, *sums) and not added.kwargs:
            divisor, eps = added, added.args[1]
        is_sum = given.keepdim and [d % val(values).dim() for d in given.dim] == [1]
        is_quotient = is_call(quotient, aten.div.Tensor, aten.div_.Tensor)
        is_read = only_user(divisor) is quotient and tuple(quotient.args) == (values, divisor)
        if is_sum and is_quotient and is_read and isinstance(eps, int | float):
            return quotient, float(eps)
    return None


def _is_last(node: fx.Node, dim: int) -> bool:
    source = arguments(node).self
    return dim % val(source).dim() == val(source).dim() - 1


def _slots(graph: fx.Graph, logits: fx.Node) -> fx.Node | None:
    """The step's cache slots, if the logits are those of its tokens."""
    for node in graph.nodes:
        if node.op == "placeholder" and input_of(node) == StepInput(name="slot_mapping"):
            same = str(val(node).shape[0]) == str(val(logits).shape[0])
            return node if same else None
    return None


def _sum(graph: fx.Graph, total: fx.Node, absorbs_norms: bool) -> None:
    given = arguments(total)
    product = given.self
    if not is_call(product, aten.mul.Tensor) or only_user(product) is not total:
        return
    if list(given.dim) != [1] or given.keepdim or val(product).dim() != 3:
        return
    rows, weight = (_source(arg) for arg in product.args[:2])
    if rows is None or weight is None:
        return
    if not is_call(rows, expert_linear.overload, quantized_expert_linear.overload):
        return
    tokens, count, width = val(product).shape
    if [str(n) for n in val(weight).shape] != [str(tokens), str(count)]:
        return
    if str(val(rows).shape[1]) != str(width):
        return
    end = _cast(total) or total
    with graph.inserting_before(end):
        made = emit(graph, sum_experts.overload, rows=rows, weight=weight, dtype=val(end).dtype)
    replace(end, made)
    add_residual(graph, made, absorbs_norms)


def add_residual(graph: fx.Graph, made: fx.Node, absorbs_norms: bool) -> None:
    """Leave a plain norm of the sum, for the next linear to absorb (fuse_linears). What shared
    experts add is added to the new sum, perhaps by their last linear."""
    shaped = only_user(made)
    if shaped is None or not is_call(shaped, *_RESHAPES):
        return
    both, mixed, shared = only_user(shaped), shaped, None
    if both is not None and is_call(both, aten.add.Tensor) and not both.kwargs:
        shared = next((other for sum_, other in operands(both) if sum_ is shaped), None)
        if not isinstance(shared, fx.Node) or not same_shape(shaped, shared):
            return
        if not absorbs_norms:
            if val(shared).dtype == val(made).dtype:
                with graph.inserting_before(both):
                    replace(both, _joined(graph, made, shaped, shared))
            return
        mixed, both = both, only_user(both)
    if both is None or not is_call(both, add_rms_norm.overload):
        return
    given, items = arguments(both), items_of(both)
    residual = next((other for sum_, other in operands(both) if sum_ is mixed), None)
    if residual is None or not same_shape(shaped, residual) or len(items) != len(both.users):
        return
    if len({val(part).dtype for part in (made, mixed, residual)}) > 1:
        return
    with graph.inserting_before(both):
        whole = _joined(graph, made, shaped, residual)
        if shared is not None:
            whole = emit(graph, aten.add.Tensor, shared, whole)
        normed = emit(graph, rms_norm.overload, whole, given.weight, given.eps, given.offset)
    for index, value in ((0, normed), (1, whole)):
        if index in items:
            replace(items[index], value)
    graph.erase_node(both)


def _joined(graph: fx.Graph, made: fx.Node, shaped: fx.Node, addend: fx.Node) -> fx.Node:
    """The sum of experts, in the form in which it is read, with an addend."""
    flat = emit(graph, aten.reshape.default, addend, [-1, val(made).shape[1]])
    total = emit(graph, sum_experts.overload, *positional(made)[:3], flat)
    return emit(graph, shaped.target, total, *shaped.args[1:])


def _source(node: Any) -> fx.Node | None:
    """What is reshaped to [T, C, N], or gets a last dimension of 1."""
    if not is_call(node, *_RESHAPES, aten.unsqueeze.default):
        return None
    given = arguments(node)
    if is_call(node, aten.unsqueeze.default) and given.dim % 3 != 2:
        return None
    source: fx.Node = given.self
    return source
