"""Decides branches on buffers whose values are known when a model is built.

Code may ask whether a table has been computed: `if self.cos[0, 0] == 0`. Capture has no values, so
Dynamo refuses that as a branch on data. Here the condition is computed from the buffer's value, if
it depends on nothing else. The branch must be the same in every call, so a model that changes such
a buffer is refused.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from llmc.compiler.build import BuiltModel, is_unset
from llmc.compiler.model_errors import MODEL_ERRORS

_JUMPS = "generic_jump.<locals>.inner"  # Dynamo's function for jumps on a condition


class KnownBranches:
    """The branches of a model that is traced: of code of its own, as transformers' has none."""

    def __init__(self, built: BuiltModel) -> None:
        model, values = built.module, built.buffers
        self._names: dict[int, list[str]] = {}  # by the id of a buffer
        self._owners: dict[str, nn.Module] = {}
        self._values: dict[int, Tensor] = {}
        # inputs that decided a branch, the id of the buffer, and Dynamo's state
        self._decisive: list[tuple[fx.Node, int, Any]] = []
        if not built.own_code:
            return
        saved = set(model.state_dict())  # what checkpoints have is not known yet
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in saved or name not in values or values[name].shape != buffer.shape:
                continue
            # false may stand for a mask that was not computed
            if values[name].dtype != torch.bool or values[name].any() or name in built.constructed:
                self._names.setdefault(id(buffer), []).append(name)
                self._owners[name] = model.get_submodule(name.rpartition(".")[0])
                self._values[id(buffer)] = values[name].to(buffer.dtype)

    @contextmanager
    def decided(self) -> Iterator[None]:
        """Inside this context, Dynamo follows these branches."""
        if not self._values:
            yield
            return
        from torch._dynamo import symbolic_convert  # late: slow to import
        from torch._dynamo.variables import ConstantVariable, TensorVariable

        def deciding(jump: Any) -> Any:
            def decide(translator: Any, instruction: Any) -> None:
                if isinstance(translator.stack[-1], TensorVariable):
                    known = self._decide(translator)
                    if known is not None:
                        translator.stack[-1] = ConstantVariable.create(known)
                jump(translator, instruction)

            return decide

        tables = [
            kind.dispatch_table for kind in _subclasses(symbolic_convert.InstructionTranslatorBase)
        ]
        before = [list(table) for table in tables]
        pops = [
            code for name, code in dis.opmap.items() if name.startswith("POP_JUMP") and code < 256
        ]
        for table in tables:
            for code in pops:
                if getattr(table[code], "__qualname__", "") == _JUMPS:
                    table[code] = deciding(table[code])
        try:
            yield
        finally:
            for table, old in zip(tables, before, strict=True):
                table[:] = old

    def changed(self) -> list[str]:
        """The names of buffers that decided a branch and that the traced code changes. To be called
        before Dynamo forgets what it traced."""
        names = set()
        for node, i, output in self._decisive:
            known = output.side_effects.id_to_variable
            for name in self._names[i]:
                assigned = known.get(id(self._owners[name]._buffers))
                is_assigned = assigned is not None and output.side_effects.is_modified(assigned)
                if is_assigned or _is_changed(node):
                    names.add(name)
        return sorted(names)

    def _decide(self, translator: Any) -> bool | None:
        """Whether the condition on the stack is true; None if it is not known."""
        nodes = _nodes_before(translator.stack[-1].as_proxy().node)
        inputs: dict[fx.Node, int] = {}
        for node in nodes:
            if node.op == "placeholder":
                argument = node.meta.get("grapharg")
                inputs[node] = id(getattr(argument, "example", None))
            if _is_changed(node) or (node.op != "placeholder" and not node.all_input_nodes):
                return None
        values = [self._values.get(i) for i in inputs.values()]
        if not values or any(value is None or is_unset(value) for value in values):
            return None
        made: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        random = torch.get_rng_state()
        try:
            with torch.no_grad(), _disable_current_modes():
                for node in nodes:
                    if node not in made:
                        made[node] = _run(node, made)
                known = bool(made[nodes[-1]])
        except MODEL_ERRORS:
            return None
        finally:
            is_random = not torch.equal(random, torch.get_rng_state())
            torch.set_rng_state(random)
        if is_random:
            return None
        self._decisive += [(node, i, translator.output) for node, i in inputs.items()]
        return known


def _subclasses(kind: Any) -> list[Any]:
    children: list[Any] = kind.__subclasses__()
    return [kind, *(found for child in children for found in _subclasses(child))]


def _nodes_before(last: fx.Node) -> list[fx.Node]:
    """What a node is computed from, and itself, in order."""
    found: set[fx.Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return [node for node in last.graph.nodes if node in found]


def _is_changed(node: fx.Node) -> bool:
    """Whether the traced code has changed a tensor in place, or a part of it, by any alias."""
    storages = {_storage(tensor) for tensor in _tensors(node)}
    return any(
        tensor._version > 0 and _storage(tensor) in storages
        for other in node.graph.nodes
        for tensor in _tensors(other)
    )


def _tensors(node: fx.Node) -> list[Tensor]:
    found: list[Any] = []
    fx.node.map_aggregate(node.meta.get("example_value"), found.append)
    return [x for x in found if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _run(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    def value(given: Any) -> Any:
        if isinstance(given, fx.Node):
            return made[given]
        is_meta = isinstance(given, torch.device) and given.type == "meta"
        return torch.device("cpu") if is_meta else given

    args = fx.node.map_aggregate(node.args, value)
    kwargs = fx.node.map_aggregate(node.kwargs, value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function" and callable(node.target):
        return node.target(*args, **kwargs)
    raise TypeError(node.op)
