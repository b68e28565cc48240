"""Small tools that passes share: emit a call with its value, read a shape, match ops."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
# Give the same elements in the same order, in another shape (see `keeps_order` for `select`).
RESHAPES = (
    aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default,
    aten.contiguous.default,
)  # fmt: skip
# Between a router and its choice of experts.
_SCORING = (
    *CASTS, aten.view.default, aten.reshape.default, aten.split_with_sizes.default,
    operator.getitem, aten.softmax.int, aten._softmax.default, aten.sigmoid.default,
    aten.add.Tensor,
)  # fmt: skip

# Values of calls by op and arguments: layers repeat, and torch takes milliseconds per call.
_worked_out: ContextVar[dict[Any, Any] | None] = ContextVar("worked_out", default=None)


@contextmanager
def cached_values() -> Iterator[None]:
    """Cache inferred values: an identical call emitted within this context reuses the result."""
    token = _worked_out.set({})
    try:
        yield
    finally:
        _worked_out.reset(token)


def emit(graph: fx.Graph, target: Any, *args: Any, **named: Any) -> fx.Node:
    """Insert a call of `target` at the graph's insertion point, and infer its shape and dtype.

    Arguments are given by position or by their names in the op's schema.
    """
    node = graph.call_function(target, args)
    if named:
        set_arguments(node, **named)
        args = node.args
    memory = _worked_out.get()
    if memory is None:
        node.meta["val"] = _work_out(node)
        return node
    fakes = fx.node.map_arg(args, lambda n: n.meta.get("val"))
    key = (target, _likeness(fakes))
    if key not in memory:
        memory[key] = _work_out(node)
    node.meta["val"] = memory[key]
    return node


def _work_out(node: fx.Node) -> Any:
    mode = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes])
    if mode is None:
        raise AssertionError(f"no fake value among the inputs of {node}")
    fakes = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    # composite ops of torch 2.11 accept symbolic sizes only in their Python implementations
    with mode, torch.no_grad(), enable_python_dispatcher():
        return node.target(*fakes, **kwargs)  # type: ignore[operator]


def _likeness(arg: Any) -> Any:
    """Everything that a call's fake value can depend on: a tensor's metadata, not its data."""
    if isinstance(arg, list | tuple):
        return (type(arg), *(_likeness(a) for a in arg))
    if isinstance(arg, Tensor):
        sizes = (*arg.shape, *arg.stride(), arg.storage_offset())
        return (arg.dtype, arg.device, *(n if isinstance(n, int) else str(n) for n in sizes))
    return (type(arg), str(arg) if isinstance(arg, torch.SymInt) else arg)


@cache
def _parameters(target: Any) -> dict[str, Any]:
    """An op's positional parameters in order, with their defaults; None for those without."""
    if target is operator.getitem:
        return {"source": None, "index": None}
    return {a.name: a.default_value for a in target._schema.arguments if not a.kwarg_only}


def arguments(call: fx.Node) -> SimpleNamespace:
    """A call's arguments by their names in the op's schema, with defaults: `arguments(n).dim`.

    Those of `operator.getitem` are `source` and `index`.
    """
    names = _parameters(call.target)
    given = dict(zip(names, call.args, strict=False))
    return SimpleNamespace(**{**names, **given, **call.kwargs})


def positional(call: fx.Node) -> tuple[Any, ...]:
    """All positional arguments of a call; omitted ones have their defaults."""
    found = vars(arguments(call))
    return tuple(found[name] for name in _parameters(call.target))


def set_arguments(call: fx.Node, **changed: Any) -> None:
    """Change some of a call's arguments, given by their names in the op's schema."""
    names = list(_parameters(call.target))
    values = vars(arguments(call)) | changed
    unknown = changed.keys() - set(names)
    if unknown:
        raise TypeError(f"{call.target} has no positional argument {sorted(unknown)[0]!r}")
    last = max(names.index(name) for name in changed)
    count = max(len(call.args), last + 1)
    call.args = tuple(values[name] for name in names[:count])
    call.kwargs = {name: value for name, value in call.kwargs.items() if name not in names[:count]}


def update_val(node: fx.Node) -> None:
    """Infer a node's value again after its inputs changed shape."""
    node.meta["val"] = _work_out(node)


def update_below(node: fx.Node) -> None:
    """Update every value computed from `node`, stopping where shapes no longer change."""
    stale = {node}
    at = node.next
    while at.op != "root":
        if at.op == "call_function" and stale.intersection(at.all_input_nodes):
            before = _likeness(at.meta.get("val"))
            update_val(at)
            if _likeness(at.meta["val"]) != before:
                stale.add(at)
        at = at.next


def val(node: Any) -> Tensor:
    """The fake tensor that stands for a node's value."""
    tensor: Tensor = node.meta["val"]
    return tensor


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of these ops, in execution order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after `first` and before `last`, which comes later."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def replace(old: fx.Node, new: fx.Node) -> None:
    """Redirect every user of `old` to `new` and erase `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def insert_after(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert `target(node, *args)` right after `node`; all users of `node` read the result."""
    readers = list(node.users)
    with node.graph.inserting_after(node):
        made = emit(node.graph, target, node, *args)
    for reader in readers:
        reader.replace_input_with(node, made)
    return made


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """The calls that read the results of a call with several, by number."""
    return {arguments(u).index: u for u in node.users if is_call(u, operator.getitem)}


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have the same shape; compares symbols by name, so no guard is added."""
    return [str(s) for s in val(a).shape] == [str(s) for s in val(b).shape]


def through(node: Any, *targets: Any) -> Any:
    """Follow first arguments upward through calls of `targets`."""
    while is_call(node, *targets):
        node = node.args[0]
    return node


def keeps_order(node: Any) -> bool:
    """Whether a call only gives its input another shape, with the elements in the same order."""
    if is_call(node, aten.select.int):
        given = arguments(node)
        return bool(str(val(given.self).shape[given.dim]) == "1")
    return is_call(node, *RESHAPES)


def through_reshapes(node: Any, *targets: Any) -> Any:
    """Follow first arguments upward through calls that keep the order, and calls of `targets`."""
    while keeps_order(node) or is_call(node, *targets):
        node = node.args[0]
    return node


def source_of(node: Any, width: int | None = None) -> Any:
    """The first value of which `node` is a reshape, perhaps in a wider dtype; with `width`, the
    first whose last dimension has that size."""
    best = node
    while keeps_order(node) or (is_call(node, *CASTS) and _widens(node)):
        node = node.args[0]
        if width is None or val(node).shape[-1] == width:
            best = node
    return best


def _widens(cast: fx.Node) -> bool:
    return val(cast).dtype.itemsize >= val(cast.args[0]).dtype.itemsize


def reshaped(graph: fx.Graph, node: fx.Node, shape: Any) -> fx.Node:
    """`node` with the elements in the same order in `shape`, of which one size may be symbolic."""
    if [str(s) for s in val(node).shape] == [str(s) for s in shape]:
        return node
    sizes = [s if isinstance(s, int) else -1 for s in shape]
    return emit(graph, aten.reshape.default, node, sizes)


def is_ranked(node: fx.Node) -> bool:
    """Whether a top-k selects among a value's elements: whether a linear is a router."""
    return any(
        is_call(user, aten.topk.default) or (is_call(user, *_SCORING) and is_ranked(user))
        for user in node.users
    )


def swapped(node: Any, a: int, b: int) -> Any:
    """The tensor whose dimensions `a` and `b` a call of transpose swaps; None for other nodes."""
    if not is_call(node, aten.transpose.int):
        return None
    call, dims = arguments(node), val(node).dim()
    return call.self if {call.dim0 % dims, call.dim1 % dims} == {a, b} else None


def pads_zeros(pad: fx.Node) -> bool:
    """Whether a call of pad or constant_pad_nd adds zeros."""
    given = arguments(pad)
    return getattr(given, "mode", "constant") == "constant" and not given.value


def operands(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Both orders of a commutative call's two arguments."""
    a, b = node.args[:2]
    yield a, b
    yield b, a
