"""Numbers that a model's code leaves in attributes of its modules, such as terms of a loss.

Dynamo's graph returns them next to the logits. They are left out if no call reads what an earlier
one has left: the code is traced again with other tensors in these attributes, and must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftValue:
    """A tensor of no dimensions in an attribute of a module. node: its name in the graph."""

    owner: nn.Module
    attribute: str
    node: str
    dtype: torch.dtype


def left_values() -> list[LeftValue]:
    """Those of the code that Dynamo has just traced; to be called by its backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # late: slow to import
    from torch._dynamo.variables import TensorVariable

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    found = []
    for variable, attributes in effects.store_attr_mutations.items():
        owner = getattr(variable, "value", None)
        for attribute, value in attributes.items():
            if not isinstance(owner, nn.Module) or not isinstance(value, TensorVariable):
                continue
            node = value.as_proxy().node
            example = node.meta["example_value"]
            if example.dim() == 0:
                found.append(
                    LeftValue(owner=owner, attribute=attribute, node=node.name, dtype=example.dtype)
                )
    return found


@contextmanager
def left_by_another_call(values: Sequence[LeftValue]) -> Iterator[None]:
    """Inside this context, the attributes have tensors from before."""
    before = [dict(vars(value.owner)) for value in values]
    try:
        for value in values:
            vars(value.owner)[value.attribute] = torch.empty((), dtype=value.dtype, device="meta")
        yield
    finally:
        for value, old in reversed(list(zip(values, before, strict=True))):
            vars(value.owner).pop(value.attribute)
            vars(value.owner).update(old)


def without_left(gm: fx.GraphModule, again: fx.GraphModule, values: Sequence[LeftValue]) -> None:
    """Leave the values out of what the graph returns, if `again`, the graph of another call, shows
    that it does not read them."""
    if _calls(gm.graph) != _calls(again.graph):
        return
    names = {value.node for value in values}
    output = gm.graph.output_node()
    [returned] = output.args
    if isinstance(returned, tuple | list):
        kept = tuple(x for x in returned if not isinstance(x, fx.Node) or x.name not in names)
        output.args = (kept,)
        gm.recompile()


def _calls(graph: fx.Graph) -> list[str]:
    return [str(node.format_node()) for node in graph.nodes if node.op != "output"]
