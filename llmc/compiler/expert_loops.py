"""Routed experts that a model's own code computes in a loop -> the same code, once for all rows.

The loop body is traced for one expert, so that its number is plain data that the code can branch
on. Weights indexed by that number are then indexed by every row's own expert instead. Experts whose
code differs (some return their input) are told apart by tracing them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from llmc.errors import CompileError
from llmc.kernels.expert_linear import expert_linear

_PARAMETERS = ["hidden_states", "top_k_index", "top_k_weights"]
_MAX_EXPERTS = 1 << 14
_SHAPING = ("view", "reshape")
_TURNING = ("t", "transpose")


def use_expert_loops(model: nn.Module) -> None:
    """Replace modules that have the arguments of transformers' experts, but loop over them."""
    made: dict[Any, Callable[..., Tensor]] = {}  # equal modules share one function
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if names == _PARAMETERS and not hasattr(module, "_apply_gate"):
            key = _likeness(module)
            if key not in made:
                made[key] = _all_rows(_kinds(module))
            module.forward = MethodType(made[key], module)


def _likeness(module: nn.Module) -> Any:
    """Everything about an experts module that its code can depend on."""
    plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return type(module), repr(plain), repr(shapes), repr(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Experts from `first` to the next kind. code: (rows, weight, expert, *parameters)."""

    first: int
    code: fx.GraphModule
    parameters: Sequence[str]  # names in the module


def _all_rows(kinds: Sequence[_Kind]) -> Callable[..., Tensor]:
    def run(kind: _Kind, module: nn.Module, *given: Tensor) -> Tensor:
        out: Tensor = kind.code(*given, *(operator.attrgetter(n)(module) for n in kind.parameters))
        return out

    def forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        top_k, width = top_k_index.shape[-1], hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, width)
        rows = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, width)
        expert, weight = top_k_index.reshape(-1), top_k_weights.reshape(-1, 1)
        out = run(kinds[0], self, rows, weight, expert)
        for kind in kinds[1:]:
            own = run(kind, self, rows, weight, expert)
            out = torch.where((expert >= kind.first).unsqueeze(1), own, out)
        pairs = out.reshape(-1, top_k, width)
        return pairs.sum(1).to(hidden_states.dtype).reshape(hidden_states.shape)

    return forward


def _kinds(module: nn.Module) -> list[_Kind]:
    """The kinds of experts. CompileError if the loop does something that can't be done by row."""
    last = _count(module) - 1
    kinds: list[_Kind] = []
    first = 0
    while True:
        text = _text(_trace(module, first))
        kinds.append(_by_row(module, first))
        if text == _text(_trace(module, last)):
            return kinds
        same, other = first, last  # kinds are ranges: find the end of this one by bisection
        while other - same > 1:
            middle = (same + other) // 2
            if _text(_trace(module, middle)) == text:
                same = middle
            else:
                other = middle
        first = other


def _count(module: nn.Module) -> int:
    """How many experts the loop has: numbers beyond that raise an error."""

    def known(expert: int) -> bool:
        try:
            _trace(module, expert)
        except (RuntimeError, IndexError):
            return False
        return True

    _trace(module, 0)  # an error here is not about the number
    few, many = 0, 1
    while known(many):
        few, many = many, many * 2
        if many > _MAX_EXPERTS:
            raise CompileError(f"{type(module).__name__} accepts any number as an expert")
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if known(middle) else (few, middle)
    return many


class _OneExpert(nn.Module):
    """The module's own code for rows that all chose the same expert."""

    def __init__(self, experts: nn.Module, expert: int) -> None:
        super().__init__()
        self.experts = experts
        self.index = torch.full((2, 2), expert)  # code may squeeze dimensions of size 1

    def forward(self, rows: Any, weight: Any) -> Any:
        return type(self.experts).forward(self.experts, rows, self.index, weight)


def _trace(module: nn.Module, expert: int) -> fx.Graph:
    return fx.Tracer().trace(_OneExpert(module, expert))


def _text(graph: fx.Graph) -> list[str]:
    """The code of an expert without its number: weights indexed by it are `picked`."""
    lines = []
    for node in graph.nodes:
        args = f"picked of {node.args[0]}" if _is_pick(node) else f"{node.args} {node.kwargs}"
        lines.append(f"{node.name} = {node.op} {node.target} {args}")
    return lines


def _is_parameter(node: Any) -> bool:
    """Whether it is a parameter, possibly reshaped, and not computed from the rows."""
    node = _unshaped(node)
    if not isinstance(node, fx.Node):
        return False
    return node.op == "get_attr" and "_tensor_constant" not in str(node.target)


def _unshaped(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in _SHAPING:
        node = node.args[0]
    return node


def _is_pick(node: fx.Node) -> bool:
    return node.target is operator.getitem and _is_parameter(node.args[0])


def _by_row(module: nn.Module, expert: int) -> _Kind:
    """The code of one expert -> code in which every row has its own expert."""
    graph = _trace(module, expert)
    rows, weight = (n for n in graph.nodes if n.op == "placeholder")
    with graph.inserting_after(weight):
        chosen = graph.placeholder("expert")
    for node in list(graph.nodes):
        if node.target is operator.getitem and _unshaped(node.args[0]) in (rows, weight):
            node.replace_all_uses_with(node.args[0])  # all rows chose the expert
        elif node.target == "index_add_":  # ... so there is nothing else to add
            total, added = node.args[0], node.args[3]
            total.replace_all_uses_with(added, delete_user_cb=lambda u, n=node: u is not n)
            node.replace_all_uses_with(added)
            graph.erase_node(node)
        elif (linear := _picked_linear(node)) is not None:
            with graph.inserting_before(node):
                out = graph.call_function(expert_linear.overload, linear(chosen))
            node.replace_all_uses_with(out)
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    for node in graph.nodes:
        if _is_pick(node) or "_tensor_constant" in str(node.target):
            raise CompileError(
                f"{type(module).__name__} computes its experts in a loop that can't be done for "
                f"all tokens at once: it uses {node.target} other than in a linear"
            )
    names = _parameters_to_inputs(graph, chosen)
    graph.lint()
    code = fx.GraphModule(_OneExpert(module, expert), graph)  # it may call their submodules
    return _Kind(first=expert, code=code, parameters=names)


def _picked_linear(node: fx.Node) -> Callable[[fx.Node], tuple[Any, ...]] | None:
    """The arguments of `expert_linear` for a product with weights indexed by an expert's number."""
    is_linear = node.target is F.linear
    if not is_linear and node.target not in (torch.matmul, torch.mm, "matmul", "mm"):
        return None
    given: list[Any] = [*node.args, node.kwargs.get("bias"), None]
    x, weight, bias = given[:3]
    transposed = not is_linear
    turned = isinstance(weight, fx.Node) and (
        weight.target in _TURNING or (weight.target is getattr and weight.args[1] == "T")
    )
    if turned:
        weight, transposed = weight.args[0], not transposed
    picked = [w for w in (weight, bias) if w is not None]
    if not all(isinstance(w, fx.Node) and _is_pick(w) for w in picked):
        return None
    of_all = [w if w is None else w.args[0] for w in (weight, bias)]
    return lambda chosen: (x, *of_all, chosen, transposed)


def _parameters_to_inputs(graph: fx.Graph, after: fx.Node) -> list[str]:
    """Turn parameters into placeholders after `after`. -> their names in the module, in order."""
    names: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if _is_parameter(n) and n.op == "get_attr"]:
        name = str(node.target).partition(".")[2]
        if name not in names:
            with graph.inserting_after(after):
                after = names[name] = graph.placeholder(f"parameter_{len(names)}")
        node.replace_all_uses_with(names[name])
        graph.erase_node(node)
    return list(names)
