"""The code of one expert -> code for rows that each have their own expert, over stacked weights."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from llmc.compiler.expert_blocks.record import NotUnderstood
from llmc.kernels.expert_linear import expert_linear

_TURNED = ("t", "transpose")
_PRODUCTS = (torch.matmul, torch.mm, operator.matmul, "matmul", "mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A parameter of all experts: those named `parts` of each, joined in dimension 0."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCode:
    """code: (rows [S, D], *extras [S, 1], expert [S], *stacks) -> [S, D]"""

    code: fx.GraphModule
    stacks: tuple[Stack, ...]


def likeness(top: nn.Module) -> Any:
    """Everything about a module that its code can depend on."""
    parts = []
    for name, module in top.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None)}
        others = {
            k: id(v) for k, v in vars(module).items() if k not in plain and not k.startswith("_")
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(n, tuple(t.shape), t.dtype) for n, t in tensors]
        parts.append((name, type(module), repr(plain), repr(others), repr(shapes)))
    return tuple(parts)


class _Tracer(fx.Tracer):
    """Traces through modules with parameters."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        has_parameters = next(m.parameters(), None) is not None
        return not has_parameters and super().is_leaf_module(m, module_qualified_name)


def expert_code(experts: Sequence[nn.Module], num_extras: int) -> ExpertCode:
    """The code that equal experts have in common. Raises NotUnderstood."""
    kinds = {likeness(expert): expert for expert in experts}
    graphs = [_trace(expert) for expert in kinds.values()]
    shapes = {str([(n, p.shape, p.dtype) for n, p in e.named_parameters()]) for e in experts}
    if len(shapes) > 1 or len({str(graph) for graph in graphs}) > 1:
        raise NotUnderstood("its experts differ in their code or their sizes")
    return by_row(experts[0], graphs[0], num_extras, dict(experts[0].named_parameters()))


def _trace(expert: nn.Module) -> fx.Graph:
    try:
        graph = _Tracer().trace(expert)
    except (fx.proxy.TraceError, TypeError, AttributeError, RuntimeError, ValueError) as e:
        raise NotUnderstood(f"the code of its experts can't be traced: {e}") from e
    buffers = {name for name, _ in expert.named_buffers()}
    if any(n.op == "get_attr" and n.target in buffers for n in graph.nodes):
        raise NotUnderstood("its experts have buffers")
    return graph


def by_row(
    expert: nn.Module,
    graph: fx.Graph,
    num_extras: int,
    parameters: Mapping[str, Tensor],
    joins: bool = True,
) -> ExpertCode:
    """The code for rows with experts of their own. `graph`: of one, with its `parameters`, and the
    modules of `expert`. `joins`: linears with one input may be one."""
    given = [n for n in graph.nodes if n.op == "placeholder"]
    for node in given[1 + num_extras :]:  # the experts are called without them
        default: Any = node.args[0] if node.args else None
        node.replace_all_uses_with(default)
        graph.erase_node(node)
    with graph.inserting_after(given[num_extras]):
        chosen = graph.placeholder("expert")
    stacks: dict[Stack, fx.Node] = {}
    linears = [linear for n in graph.nodes if (linear := _linear(n)) is not None]
    for group in _with_equal_inputs(linears) if joins else [[one] for one in linears]:
        _replace(graph, group, chosen, stacks, parameters)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        if parameters[node.target].dim() > 1:
            raise NotUnderstood(f"its experts use {node.target} other than in a linear")
        stack = _stacked(graph, (node.target,), chosen, stacks)
        with graph.inserting_before(next(n for n in graph.nodes if n in node.users)):
            own = graph.call_function(torch.index_select, (stack, 0, chosen))
            if parameters[node.target].dim() == 0:
                own = graph.call_method("unsqueeze", (own, 1))
        node.replace_all_uses_with(own)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    return ExpertCode(code=fx.GraphModule(expert, graph), stacks=tuple(stacks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    node: fx.Node
    x: fx.Node
    weight: str
    bias: str | None
    transposed: bool  # the weight is [inputs, channels]
    is_wide: bool  # computed in float32, whatever the dtype of the weight is


def _linear(node: fx.Node) -> _Linear | None:
    if node.op == "get_attr":
        return None
    is_linear = node.target is F.linear
    if not is_linear and node.target not in _PRODUCTS:
        return None
    given: list[Any] = [*node.args, *node.kwargs.values(), None]
    if not node.args or set(node.kwargs) - {"weight", "bias", "other", "mat2"}:
        return None
    x, weight, bias = (*given, None)[:3] if is_linear else (*given[:2], None)
    transposed = not is_linear
    is_wide = False
    while _is_turned(weight) or _is_widened(weight):
        if _is_turned(weight):
            transposed = not transposed
        else:
            is_wide = True
        weight = weight.args[0]
    if not all(n is None or _is_parameter(n) for n in (weight, bias)) or weight is None:
        return None
    return _Linear(
        node=node,
        x=x,
        weight=weight.target,
        bias=None if bias is None else bias.target,
        transposed=transposed,
        is_wide=is_wide,
    )


def _is_widened(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_method":
        return False
    return node.target == "float" or (node.target == "to" and node.args[1:] == (torch.float32,))


def _is_turned(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    is_attribute = node.target is getattr and node.args[1] in ("T", "mT")
    return is_attribute or (node.op == "call_method" and node.target in _TURNED)


def _is_parameter(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _with_equal_inputs(linears: Sequence[_Linear]) -> list[list[_Linear]]:
    """Groups of linears that can be one; their channels are in the order of `fuse_act_mul`."""
    groups: dict[Any, list[_Linear]] = {}
    uses = Counter(one.weight for one in linears)
    for one in linears:
        alone = one.transposed or one.is_wide or uses[one.weight] > 1
        groups.setdefault(one.node if alone else (one.x, one.bias is None), []).append(one)
    return [sorted(group, key=_is_multiplied) for group in groups.values()]


def _is_multiplied(one: _Linear) -> bool:
    """Whether it is the one without the activation."""
    return all(user.target in (operator.mul, torch.mul, "mul") for user in one.node.users)


def _replace(
    graph: fx.Graph,
    group: Sequence[_Linear],
    chosen: fx.Node,
    stacks: dict[Stack, fx.Node],
    parameters: Mapping[str, Tensor],
) -> None:
    first = group[0]
    weight = _stacked(graph, tuple(one.weight for one in group), chosen, stacks)
    biases = tuple(one.bias for one in group if one.bias is not None)
    bias = _stacked(graph, biases, chosen, stacks) if biases else None
    nodes = {one.node for one in group}
    with graph.inserting_before(next(n for n in graph.nodes if n in nodes)):
        x = first.node.args[0]
        if first.is_wide:  # all of the experts' weights would be widened
            x = graph.call_function(_like, (x, weight))
        made = graph.call_function(
            expert_linear.overload, (x, weight, bias, chosen, first.transposed)
        )
        if first.is_wide:
            made = graph.call_method("float", (made,))
        parts = [made]
        if len(group) > 1:
            sizes = [parameters[one.weight].shape[0] for one in group]
            split = graph.call_method("split", (made, sizes, -1))
            parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(group))]
    for one, part in zip(group, parts, strict=True):
        one.node.replace_all_uses_with(part)
        graph.erase_node(one.node)


def _like(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(weight.dtype)


def _stacked(
    graph: fx.Graph, parts: tuple[str, ...], chosen: fx.Node, stacks: dict[Stack, fx.Node]
) -> fx.Node:
    own = [part.removesuffix(".weight") for part in parts]
    if all(part.endswith(".bias") for part in parts):
        own = [*(part.removesuffix(".bias") for part in parts), "bias"]
    stack = Stack(name="_".join(own).replace(".", "_"), parts=parts)
    if stack not in stacks:
        with graph.inserting_after(next(reversed(stacks.values()), chosen)):
            stacks[stack] = graph.placeholder(f"stack_{len(stacks)}")
    return stacks[stack]
