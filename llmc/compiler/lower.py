"""The rewritten graph -> a plain Python function over the step's tensors (level -O0).

Weights, caches and constants are bound; ops are called through the dispatcher directly. The source
has one line per node, so that it can be printed and read (`StepFunction.source`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.passes.inputs import StepInput, input_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFunction:
    """call(**step inputs) -> (next_token [S] int64, logits [S, V]); inputs by contract name.

    Tokens, rows, samples and the block table's width must be at least `min_size`; `uncompiled`, the
    step that this one was compiled from, accepts fewer. `references` are the ops that use their
    reference implementations on a GPU, which read tensors on the host, so that the step can't be
    captured in a CUDA graph. `only_ops`: it calls nothing but torch ops.
    """

    call: Callable[..., tuple[Tensor, Tensor]]
    inputs: tuple[str, ...]
    source: str
    level: int = 0
    min_size: int = 1
    uncompiled: StepFunction | None = None
    references: tuple[str, ...] = ()
    only_ops: bool = False


def lower(gm: fx.GraphModule, bound: Mapping[str, Tensor]) -> StepFunction:
    """Generate a step function. `bound` has the tensor of every placeholder that is not a step
    input, by node name."""
    writer = _Writer(gm.graph, bound)
    source = writer.write()
    scope: dict[str, Any] = dict(writer.scope)
    exec(compile(source, "<llmc step>", "exec"), scope)
    return StepFunction(
        call=scope["step"],
        inputs=tuple(writer.inputs),
        source=source,
        references=gpu_references(gm.graph),
        only_ops=all(_is_op(n.target) for n in gm.graph.nodes if n.op == "call_function"),
    )


def _is_op(target: object) -> bool:
    """Whether it is a torch op or arithmetic on sizes."""
    if isinstance(target, torch._ops.OpOverload):
        return True
    return getattr(target, "__module__", None) in ("_operator", "math", "torch")


def gpu_references(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the ops on a GPU that `lower_kernels` left with their reference implementations."""
    names = {
        node.target._schema.name.partition("::")[2]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "llmc"
        and any(_on_gpu(arg) for arg in node.all_input_nodes)
    }
    return tuple(sorted(names))


def _on_gpu(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.device.type == "cuda"


class _Writer:
    """Writes one function; constants and callables go to its global scope by short names."""

    def __init__(self, graph: fx.Graph, bound: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.bound = bound
        self.scope: dict[str, Any] = {}
        self.inputs: list[str] = []
        self.names: dict[fx.Node, str] = {}
        self.callables: dict[Any, str] = {}
        self.last_use = self._last_uses()

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the intermediate values that it reads last."""
        seen: set[fx.Node] = set()
        result: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.graph.nodes):
            for source in node.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    if source.op == "call_function":
                        result.setdefault(node, []).append(source)
        return result

    def write(self) -> str:
        lines = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                lines.append(f"    return {self._arg(node.args[0])}")
            else:
                lines.append("    " + self._call(node))
                done = [self.names[n] for n in self.last_use.get(node, ()) if n.users]
                if done:
                    lines.append("    " + " = ".join(done) + " = None")
        return f"def step(*, {', '.join(self.inputs)}):\n" + "\n".join(lines) + "\n"

    def _placeholder(self, node: fx.Node) -> None:
        role = input_of(node)
        if isinstance(role, StepInput):
            self.names[node] = role.name
            self.inputs.append(role.name)
        else:
            name = f"w_{node.name}"
            self.names[node] = name
            self.scope[name] = self.bound[node.name]

    def _call(self, node: fx.Node) -> str:
        name = self.names[node] = f"v_{node.name}"
        if node.target is operator.getitem:
            return f"{name} = {self._arg(node.args[0])}[{self._arg(node.args[1])}]"
        if node.target is torch.ops.aten.sym_size.int:
            return f"{name} = {self._arg(node.args[0])}.shape[{self._arg(node.args[1])}]"
        args = [self._arg(a) for a in node.args]
        args += [f"{k}={self._arg(v)}" for k, v in node.kwargs.items()]
        return f"{name} = {self._callable(node.target)}({', '.join(args)})"

    def _callable(self, target: Any) -> str:
        if target not in self.callables:
            is_op = isinstance(target, torch._ops.OpOverload)
            label = re.sub(r"\W+", "_", str(target) if is_op else target.__name__)
            name = f"{label}_{len(self.callables)}"
            self.callables[target] = name
            # call the overload's own op, which saves a Python frame
            self.scope[name] = getattr(target, "_op", target)
        return self.callables[target]

    def _arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, tuple):
            return "(" + "".join(f"{self._arg(a)}, " for a in arg) + ")"
        if isinstance(arg, list):
            return "[" + ", ".join(self._arg(a) for a in arg) + "]"
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        name = f"c_{len(self.scope)}"
        self.scope[name] = arg
        return name
