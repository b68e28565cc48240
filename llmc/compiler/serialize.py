"""A rewritten graph <-> JSON and tensors: plain data, so that loading runs nothing but lookups.

Only what later stages need is stored: calls with their arguments, and placeholders with their role,
shape and dtype. Ops are stored by torch's names and looked up in `torch.ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.quantized_linear import Quantization
from llmc.kernels.registry import OPS
from llmc.passes.base import graph_module
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    Input,
    QuantizedPart,
    Shard,
    StateInput,
    StepInput,
    TapInput,
    WeightInput,
)

Json = Any


_ANY_SIZE = 19  # replaces symbolic sizes in loaded values; nothing must depend on it


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The metadata of a value in a loaded graph. A fake tensor would import the compiler."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        dense = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return True

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


class CannotSerialize(Exception):
    """The graph has something that plain data can't express, so it is not cached."""


def dump_graph(graph: fx.Graph) -> tuple[list[Json], dict[str, Tensor]]:
    """-> (nodes in order, constants by the name of the first placeholder that has them).

    The constants do not share memory. Raises CannotSerialize.
    """
    nodes: list[Json] = []
    constants = _Constants()
    for node in graph.nodes:
        entry: dict[str, Json] = {"name": node.name, "op": node.op}
        if "val" in node.meta:
            entry["val"] = _dump_val(node.meta["val"])
        if node.op == "placeholder":
            entry["role"] = _dump_role(node, constants)
        elif node.op == "call_function":
            entry["target"] = _dump_target(node.target)
            entry["args"] = [_dump(a) for a in node.args]
            entry["kwargs"] = {k: _dump(v) for k, v in node.kwargs.items()}
        elif node.op == "output":
            entry["args"] = [_dump(a) for a in node.args]
        else:
            raise CannotSerialize(node.op)
        nodes.append(entry)
    return nodes, constants.by_name


class _Constants:
    """The tensors of a graph's constants. One used by several placeholders is stored once."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a constant. -> the name that it is stored under. Views of others are copied."""
        facts = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = self._names.setdefault(facts if tensor.numel() else name, name)
        if known == name:
            storages = {t.untyped_storage().data_ptr() for t in self.by_name.values()}
            is_view = tensor.untyped_storage().data_ptr() in storages
            own = tensor.clone() if is_view else tensor
            self.by_name[name] = own.contiguous()
        return known


def load_graph(
    nodes: list[Json], constants: Mapping[str, Tensor], device: torch.device
) -> fx.GraphModule:
    """The inverse of `dump_graph`, for `device`; values are TensorFacts with fixed sizes.

    Raises KeyError, AttributeError, TypeError or ValueError for data in another format.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for entry in nodes:
        name = entry["name"]
        if entry["op"] == "placeholder":
            node = graph.placeholder(name)
            node.meta["input"] = _load_role(entry["role"], constants)
        elif entry["op"] == "call_function":
            args = tuple(_load(a, env, device) for a in entry["args"])
            kwargs = {k: _load(v, env, device) for k, v in entry["kwargs"].items()}
            node = graph.call_function(_load_target(entry["target"]), args, kwargs)
        else:
            node = graph.output(_load(entry["args"][0], env, device))
        if "val" in entry:
            node.meta["val"] = _load_val(entry["val"], device)
        env[name] = node
        if node.op != "output":
            node.name = name
    return graph_module(torch.nn.Module(), graph)


def _dump_val(val: Any) -> Json:
    """Shape, strides and dtype of a value, with null for symbolic sizes (there are none in a loaded
    graph)."""
    if isinstance(val, list | tuple):
        return {"items": [_dump_val(v) for v in val]}
    if not isinstance(val, Tensor | TensorFacts):
        return None
    strides = val.strides if isinstance(val, TensorFacts) else val.stride()
    return {
        "shape": [s if isinstance(s, int) else None for s in val.shape],
        "stride": [s if isinstance(s, int) else None for s in strides],
        "dtype": str(val.dtype).removeprefix("torch."),
    }


def _load_val(data: Json, device: torch.device) -> Any:
    if data is None:
        return _ANY_SIZE
    if "items" in data:
        return [_load_val(item, device) for item in data["items"]]
    shape, stride = ([_ANY_SIZE if s is None else s for s in data[k]] for k in ("shape", "stride"))
    return TensorFacts(tuple(shape), tuple(stride), getattr(torch, data["dtype"]), device)


def _dump_role(node: fx.Node, constants: _Constants) -> Json:
    role: Input = node.meta["input"]
    if isinstance(role, StepInput):
        return {"kind": "step", "name": role.name}
    if isinstance(role, CacheInput):
        return {"kind": "cache", **asdict(role)}
    if isinstance(role, StateInput):
        return {"kind": "state", "call": role.call, "op": role.op}
    if isinstance(role, TapInput):
        return {"kind": "tap", "number": role.number}
    if isinstance(role, WeightInput):
        return {
            "kind": "weight",
            "parts": list(role.parts),
            "transposed": role.transposed,
            "quantized": None if role.quantized is None else asdict(role.quantized),
            "shards": [shard and asdict(shard) for shard in role.shards],
            "first_rank": role.first_rank,
            "order": [list(rows) for rows in role.order],
            "functions": list(role.functions),
        }
    if isinstance(role, AdapterInput):
        return {"kind": "adapter", **asdict(role)}
    return {
        "kind": "constant",
        "tensor": constants.add(node.name, role.tensor),
        "shard": role.shard and asdict(role.shard),
    }


def _load_role(role: Json, constants: Mapping[str, Tensor]) -> Input:
    match role["kind"]:
        case "step":
            return StepInput(name=role["name"])
        case "cache":
            return CacheInput(layer=role["layer"], part=role["part"], tokens=role["tokens"])
        case "state":
            return StateInput(call=role["call"], op=role["op"])
        case "tap":
            return TapInput(number=role["number"])
        case "weight":
            low = role["quantized"]
            return WeightInput(
                parts=tuple(role["parts"]),
                transposed=role["transposed"],
                quantized=low and QuantizedPart(**{**low, "to": Quantization(**low["to"])}),
                shards=tuple(_load_shard(shard) for shard in role["shards"]),
                first_rank=role["first_rank"],
                order=tuple((int(start), int(length)) for start, length in role["order"]),
                functions=tuple(role["functions"]),
            )
        case "adapter":
            return AdapterInput(
                op=role["op"],
                matrix=role["matrix"],
                weights=tuple(role["weights"]),
                widths=tuple(role["widths"]),
                shards=tuple(_load_shard(shard) for shard in role["shards"]),
            )
        case "constant":
            return ConstantInput(tensor=constants[role["tensor"]], shard=_load_shard(role["shard"]))
        case other:
            raise ValueError(f"unknown role {other!r}")


def _load_shard(shard: Json) -> Shard | None:
    if shard is None:
        return None
    sections = tuple((int(length), int(parts)) for length, parts in shard["sections"])
    rank = None if shard["rank"] is None else int(shard["rank"])
    return Shard(dim=int(shard["dim"]), sections=sections, size=int(shard["size"]), rank=rank)


# Python's own functions in a graph: indexing, and arithmetic on sizes.
_PLAIN: dict[str, Any] = {
    f.__name__: f
    for f in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)
    + (operator.mod, operator.neg)
}


def _dump_target(target: Any) -> str:
    if target in _PLAIN.values():
        return str(target.__name__)
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise CannotSerialize(str(target))


def _load_target(name: str) -> Any:
    if name in _PLAIN:
        return _PLAIN[name]
    namespace, op, overload = name.split(".")
    if namespace == "llmc" and op not in OPS:
        _define_ops()
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def _define_ops() -> None:
    """Import the modules of all ops: a start imports few of them, and the passes, which insert
    ops, only for a program that is not cached."""
    import llmc.kernels

    for module in iter_modules(llmc.kernels.__path__, "llmc.kernels."):
        if not module.ispkg:
            import_module(module.name)


_TAGGED: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def _dump(arg: Any) -> Json:
    if isinstance(arg, fx.Node):
        return {"node": arg.name}
    if isinstance(arg, list | tuple):
        return {"tuple" if isinstance(arg, tuple) else "list": [_dump(a) for a in arg]}
    if isinstance(arg, float):
        return {"float": arg.hex()}
    if arg is None or isinstance(arg, bool | int | str):
        return arg
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    for kind, tag in _TAGGED.items():
        if isinstance(arg, kind):
            return {tag: str(arg).removeprefix("torch.")}
    raise CannotSerialize(f"{type(arg).__name__} {arg!r}")


def _load(data: Json, env: Mapping[str, fx.Node], device: torch.device) -> Any:
    if not isinstance(data, dict):
        return data
    ((tag, value),) = data.items()
    match tag:
        case "node":
            return env[value]
        case "list":
            return [_load(v, env, device) for v in value]
        case "tuple":
            return tuple(_load(v, env, device) for v in value)
        case "float":
            return float.fromhex(value)
        case "device":
            stored = torch.device(value)
            return device if stored.type == device.type else stored  # another rank's has an index
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, value)
        case other:
            raise ValueError(f"unknown tag {other!r}")
