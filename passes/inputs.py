"""What each placeholder of a step graph is: the roles that capture assigns and passes rewrite.

Every placeholder carries one of these in `node.meta["input"]`. Weights are graph inputs, never
constants, so that one graph serves every checkpoint of an architecture; a pass that wants them
in another form (merged, quantized) replaces the placeholder by one with another recipe, and the
loader fills the recipe straight from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from llmc.kernels.quantized_linear import Part, Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A tensor that the runner hands over at every step, by its name in the step contract."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInput:
    """One half of a layer's paged cache. `layer` counts attention calls in execution order."""

    layer: int
    part: Literal["key", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """One of the tensors that a quantized weight becomes. All have the same recipe else.

    `stored`: it is the checkpoint's own bits; else it is quantized while it loads.
    """

    to: Quantization
    part: Part
    stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInput:
    """What a recurrent call keeps of every request, in slots: `call` counts them in order."""

    call: int
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInput:
    """A recipe over the model's parameters: `parts` by name, concatenated along dimension 0.

    `transposed`: each part is stored [in, out] and is turned to [out, in] first.
    `quantized`: the result in few bits, its scales or zeros.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    quantized: QuantizedPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConstantInput:
    """A tensor known at capture: a buffer that the model computes from its config, or a table."""

    tensor: Tensor


Input = StepInput | CacheInput | StateInput | WeightInput | ConstantInput


def input_of(node: Any) -> Input | None:
    """The role of a placeholder, or None for every other node."""
    if isinstance(node, fx.Node) and node.op == "placeholder":
        role: Input = node.meta["input"]
        return role
    return None


def add_input(graph: fx.Graph, name: str, role: Input, val: Tensor) -> fx.Node:
    """A new placeholder after the existing ones; `val` is a fake tensor of its shape and dtype."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.target = node.name  # a name that is taken gets a number
    node.meta["input"] = role
    node.meta["val"] = val
    return node


def add_constant(graph: fx.Graph, name: str, tensor: Tensor, like: fx.Node) -> fx.Node:
    """A tensor of the caller as a new placeholder; `like` is any node that has a value."""
    fake = fake_like(like, *tensor.shape, dtype=tensor.dtype)
    return add_input(graph, name, ConstantInput(tensor=tensor), fake)


def step_input(graph: fx.Graph, name: str, val: Tensor) -> fx.Node:
    """The placeholder of the step input `name`, added when the graph has none yet."""
    node: fx.Node
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["input"] == StepInput(name=name):
            return node
    return add_input(graph, name, StepInput(name=name), val)


# Step inputs that every group of layers with blocks of its own has one of: see `group_caches`.
GROUPED = ("slot_mapping", "block_table")


def of_group(name: str, group: int) -> str:
    """The name of a grouped step input: the first group's has no number."""
    return f"{name}_{group}" if group else name


def base_name(name: str) -> str:
    """The step input that a name of `of_group` stands for."""
    return next((base for base in GROUPED if name.startswith(f"{base}_")), name)


def fake_like(node: fx.Node, *shape: Any, dtype: torch.dtype) -> Tensor:
    """An empty fake tensor in the same fake mode as `node`'s value."""
    return node.meta["val"].new_empty(shape, dtype=dtype)  # type: ignore[no-any-return]
