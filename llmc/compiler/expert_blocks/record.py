"""Runs a block's own code on random tokens, and records the calls of torch and of modules.

The code runs for real, so it may branch on values. Experts are replaced by cheap functions that
differ from each other, so their weights are not needed. What is recorded is one path through the
code, with the sizes of that run; generalize.py finds out which part of it holds for every run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

# What functions say about tensors that does not depend on their data.
_ABOUT = {
    "__get__", "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "is_tensor", "ndimension", "nelement", "numel",
    "result_type", "size", "storage_offset", "stride", "type",
}  # fmt: skip
# Functions whose result has a size that depends on data; the last two only with masks.
_SELECTING = {
    "argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive", "where",
    "__getitem__", "__setitem__",
}  # fmt: skip
# Functions by which loops fill a tensor: what it was before is not the result of all experts.
_FILLING = {
    "__setitem__", "index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_",
    "scatter_reduce_",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that the code reads: a call's result, or the part of it at `path`.

    `changes`: the calls that have changed its data in place since.
    """

    call: int
    path: tuple[Any, ...] = ()
    changes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, with every tensor in its arguments replaced by a Value.

    kind: input, attribute (target: its name in the block), module (its name), expert (its number),
    function (of torch), or unknown (a tensor from elsewhere).
    """

    kind: str
    target: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """rows [.., D], and what else the expert gets for each row [S, 1]."""

    number: int
    rows: Tensor
    extras: tuple[Tensor, ...]


class NotUnderstood(Exception):
    """A block computes something else; the message says what is different."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """A run. `known`: what every value read before the first expert was then. `read`: what values
    were when they were read after the last expert. `branches`: those that Python read, or that
    decided about the size of a tensor, so that the code may branch on them."""

    tokens: int
    dtype: torch.dtype  # of the tokens' states
    calls: list[Call] = field(default_factory=list)
    expert_calls: list[ExpertCall] = field(default_factory=list)
    branches: list[Value] = field(default_factory=list)
    known: dict[Value, Tensor] = field(default_factory=dict)
    read: dict[Value, Tensor] = field(default_factory=dict)
    of_experts: set[int] = field(default_factory=set)  # calls that depend on an expert
    products: dict[int, list[int]] = field(default_factory=dict)  # by expert, with its slices
    rows_of: dict[int, Value] = field(default_factory=dict)  # of products of tokens' states
    numbers: dict[Value, int] = field(default_factory=dict)  # that experts' slices have
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)  # that the code set
    output: Any = None
    result: Any = None  # the same with Values instead of tensors

    def slice_of(self, call: Call) -> tuple[str, int] | None:
        """The parameter and the number, if the call takes an expert's slice of a parameter."""
        if getattr(call.target, "__name__", "") != "__getitem__":
            return None
        source, index = call.args
        origin = self.calls[source.call] if isinstance(source, Value) else None
        number = self.numbers.get(index) if isinstance(index, Value) else index
        if origin is None or origin.kind != "attribute" or type(number) is not int:
            return None
        return str(origin.target), number

    def depends(self, value: Value) -> bool:
        """Whether it depends on an expert."""
        return not self.of_experts.isdisjoint((value.call, *value.changes))

    def source(self, value: Value) -> Call | None:
        """The call that gave the value its present data; None if only a part of it was changed."""
        if not value.changes:
            return self.calls[value.call]
        last = self.calls[value.changes[-1]]
        changed = next(iter(inner_values(last.args)), None)
        before = Value(value.call, value.path, value.changes[:-1])
        return last if changed == before and last.kind == "function" else None


def inner_values(structure: Any) -> list[Value]:
    """The Values in a structure, or in a call's arguments."""
    if isinstance(structure, Call):
        structure = structure.args, structure.kwargs
    found: list[Value] = []
    _mapped(structure, lambda x: found.append(x) if isinstance(x, Value) else None)
    return found


class StandIns:
    """Functions of single rows instead of the experts, all different."""

    def __init__(self, count: int, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._scale = torch.empty(count, width).uniform_(0.5, 1.5, generator=generator)
        self._shift = torch.empty(count, width).uniform_(-1, 1, generator=generator)

    def __call__(self, rows: Tensor, number: Tensor | int, *extras: Tensor) -> Tensor:
        scale, shift = self._scale[number].to(rows.dtype), self._shift[number].to(rows.dtype)
        out = torch.sin(rows * scale) + shift
        for i, extra in enumerate(extras, start=2):
            out = out + torch.cos(extra * scale * i).to(rows.dtype)
        return out


Products = Callable[[Tensor, str, int, int], Tensor]
"""(x [S, K], name of a parameter, number of an expert, channels) -> [S, channels]"""
_CASTS = {"float", "to", "type", "type_as"}
_PRODUCTS = (F.linear, Tensor.matmul, torch.matmul, Tensor.mm, torch.mm)


def record(
    block: nn.Module,
    hidden: Tensor,
    experts: Mapping[nn.Module, int],
    inlined: set[nn.Module],
    products: Products | None = None,
) -> Recording:
    """Run a block with hidden [..., T, D]. `experts`: the number of each. `inlined`: modules whose
    calls are recorded, not they themselves. `products`: with slices of parameters on meta."""
    recorder = _Recorder(block, hidden, products)
    stand_ins = StandIns(len(experts), hidden.shape[-1])
    own_call = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in experts:
            if kwargs or not args or not all(isinstance(x, Tensor) for x in args):
                raise NotUnderstood("its experts take more than tensors")
            return recorder.expert(experts[module], args, stand_ins)
        name = recorder.names.get(module)
        if name is None or module in inlined or recorder.is_paused:
            return own_call(module, *args, **kwargs)
        with recorder.paused():
            known, given = recorder.versions((args, kwargs)), recorder.values((args, kwargs))
            made = own_call(module, *args, **kwargs)
        done = Call(kind="module", target=name, args=given[0], kwargs=given[1])
        return recorder.add(done, made, known)

    before = {module: dict(vars(module)) for module in inlined}
    with torch.no_grad(), mock.patch.object(nn.Module, "__call__", call), recorder:
        for expert in experts:  # code may call `expert.forward`
            vars(expert)["forward"] = expert.__call__
        result = run_block(block, hidden)
        recorder.end(result)
    for module, old in before.items():
        for key, value in vars(module).items():
            if key not in old or old[key] is not value:
                recorder.recording.attributes[recorder.names[module], key] = value
        vars(module).clear()  # other runs begin like this one
        vars(module).update(old)
    return recorder.recording


def num_needed(module: nn.Module) -> int:
    """The number of arguments without a default; 0 for a mere container."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return 0
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed)


def run_block(block: nn.Module, hidden: Tensor) -> Any:
    """Run the code of its class. What it takes besides states is None."""
    return type(block).forward(block, hidden, *[None] * (num_needed(block) - 1))


class _Recorder(TorchFunctionMode):
    def __init__(self, block: nn.Module, hidden: Tensor, products: Products | None) -> None:
        super().__init__()
        self._products = products
        self._slices: dict[int, tuple[str, int]] = {}  # by the id of a tensor
        self.recording = Recording(tokens=hidden.shape[-2], dtype=hidden.dtype)
        self.is_paused = False
        self._values: dict[int, Value] = {}  # by the id of a tensor, without its changes
        self._kept: list[Tensor] = []  # ids are not reused while objects are alive
        self._tensors: dict[Any, Tensor] = {}  # by call and path
        self._changes: dict[int, list[int]] = {}  # by storage
        own = [*block.named_parameters(), *block.named_buffers()]
        self._attributes = {id(tensor): name for name, tensor in own}
        self.names = {module: name for name, module in block.named_modules()}
        self._add_tensor(Call(kind="input"), hidden)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self.paused():
            known = self.versions((args, kwargs))
            given = self.values((args, kwargs), getattr(func, "__name__", "") not in _FILLING)
            if self._products is not None and any(tensor.is_meta for tensor, _ in known):
                made = self._with_slices(func, args, kwargs, given[0])
            else:
                made = func(*args, **kwargs)
            self._note_number(func, args, given[0])
        done = Call(kind="function", target=func, args=given[0], kwargs=given[1])
        return self.add(done, made, known)

    def _note_number(self, func: Any, args: Any, given: Any) -> None:
        """Note the number in a tensor that indexes a parameter."""
        if func is Tensor.__getitem__ and isinstance(given[1], Value):
            index = args[1]
            if index.numel() == 1 and index.dtype in (torch.int64, torch.int32):
                self.recording.numbers[given[1]] = int(index)

    def _with_slices(self, func: Any, args: Any, kwargs: Any, given: Any) -> Any:
        """A call with parameters without values, or slices of them."""
        tensors = _tensors((args, kwargs))
        if not any(t.is_floating_point() and not t.is_meta for t in tensors):
            made = func(*args, **kwargs)
            made = _aside(made) if made is args[0] else made
            self._note_slices(func, args, made)
            return made
        operands: list[Any] = [*args, *kwargs.values()]
        x, weight, *bias = operands
        found = self._slices.get(id(weight))
        if func not in _PRODUCTS or found is None or x.is_meta or self._products is None:
            raise NotUnderstood("it uses the experts' parameters other than in linears")
        name, number = found
        channels = func(x.to("meta"), weight).shape[-1]
        made = self._products(x, name, number, channels)
        self._begin_expert()
        recording, index = self.recording, len(self.recording.calls)
        recording.of_experts.add(index)
        recording.products.setdefault(number, []).append(index)
        if not recording.depends(given[0]):
            value = self._before_casts(given[0])
            recording.rows_of[index] = value
            rows = self._tensors[value.call, value.path].detach().clone()
            recording.expert_calls.append(ExpertCall(number=number, rows=rows, extras=()))
        return made if not bias or bias[0] is None else made + bias[0]

    def _before_casts(self, value: Value) -> Value:
        """The value of which this one is only another dtype."""
        while not value.changes:
            call = self.recording.calls[value.call]
            if getattr(call.target, "__name__", "") not in _CASTS:
                break
            value = call.args[0]
        return value

    def _note_slices(self, func: Any, args: Any, made: Any) -> None:
        """Note of which expert the results are."""
        whole = self._attributes.get(id(args[0]))
        for path, part in _parts(made):
            if whole is None:
                found = self._slices.get(id(args[0]))
            elif func is Tensor.unbind or func is torch.unbind:
                found = whole, int(path[0])
            elif func is Tensor.__getitem__ and isinstance(args[1], int | Tensor):
                found = whole, int(args[1])
            else:
                found = None
            if found is not None:
                self._slices[id(part)] = found

    @contextmanager
    def paused(self) -> Iterator[None]:
        was, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was

    def versions(self, given: Any) -> list[tuple[Tensor, int]]:
        return [(t, t._version) for t in _tensors(given)]

    def values(self, given: Any, keep: bool = True) -> Any:
        """The structure with Values instead of tensors, whose data is kept if it is of experts."""
        return _mapped(given, lambda x: self._value(x, keep) if isinstance(x, Tensor) else x)

    def add(self, call: Call, made: Any, known: list[tuple[Tensor, int]]) -> Any:
        """Record a call. -> what it gives to the code."""
        if call.kind == "function":
            self.recording.branches += self._decisive(call, known, made)
        changed = [tensor for tensor, version in known if tensor._version != version]
        if not changed and not any(_parts(made)):
            return made
        index = len(self.recording.calls)
        self._append(call)
        for tensor in changed:
            self._changes.setdefault(_storage(tensor), []).append(index)
        if changed:
            return made  # the tensor itself, which is known
        given = {id(tensor) for tensor, _ in known}
        if any(id(part) in given for _, part in _parts(made)):
            # a result that is an argument itself becomes another tensor with the same data
            with self.paused():
                made = _mapped(made, _aside)
        for path, part in _parts(made):
            self._know(part, Value(index, path))
        return made

    def _decisive(self, call: Call, known: list[tuple[Tensor, int]], made: Any) -> Iterator[Value]:
        """The arguments that the code can branch on after the call."""
        name = getattr(call.target, "__name__", "")
        is_read = made is not None and not any(_parts(made)) and name not in _ABOUT
        selects = name in _SELECTING and (name != "where" or len(call.args) == 1)
        for tensor, _ in known:
            is_mask = tensor.dtype in (torch.bool, torch.uint8)
            if is_read or (selects and (is_mask or name[:2] != "__")):
                yield self._value(tensor)

    def expert(self, number: int, given: Sequence[Tensor], experts: StandIns) -> Tensor:
        recording = self.recording
        with self.paused():
            self._begin_expert()
            rows, *extras = (tensor.detach().clone() for tensor in given)
            if any(extra.shape != (rows.shape[-2], 1) for extra in extras):
                raise NotUnderstood("its experts take more than a number for each row")
            recording.expert_calls.append(
                ExpertCall(number=number, rows=rows, extras=tuple(extras))
            )
            call = Call(kind="expert", target=number, args=tuple(map(self._value, given)))
            return self._add_tensor(call, experts(rows, number, *extras))

    def _begin_expert(self) -> None:
        recording = self.recording
        if not recording.expert_calls:
            kept = [t for t in self._kept if not t.is_meta]
            recording.known = {self._value(t): t.detach().clone() for t in kept}
        recording.read.clear()

    def end(self, result: Any) -> None:
        with self.paused():
            self.recording.output = result
            self.recording.result = self.values(_plain(result))

    def _add_tensor(self, call: Call, tensor: Tensor) -> Tensor:
        self._know(tensor, Value(len(self.recording.calls)))
        self._append(call)
        return tensor

    def _append(self, call: Call) -> None:
        recording = self.recording
        if call.kind == "expert" or any(map(recording.depends, inner_values(call))):
            recording.of_experts.add(len(recording.calls))
        recording.calls.append(call)

    def _know(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._tensors[value.call, value.path] = tensor
        self._kept.append(tensor)

    def _value(self, tensor: Tensor, keep: bool = False) -> Value:
        if id(tensor) not in self._values:
            name = self._attributes.get(id(tensor))
            kind = "unknown" if name is None else "attribute"
            self._add_tensor(Call(kind=kind, target=name), tensor)
        own = self._values[id(tensor)]
        changes = tuple(c for c in self._changes.get(_storage(tensor), ()) if c > own.call)
        value = Value(own.call, own.path, changes)
        if keep and self.recording.depends(value) and value not in self.recording.read:
            self.recording.read[value] = tensor.detach().clone()
        return value


def _plain(result: Any) -> Any:
    """Named tuples and the like -> tuples."""
    return tuple(result) if isinstance(result, tuple) else result


def _aside(x: Any) -> Any:
    return x.detach() if _is_tensor(x) else x


def _parts(made: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in a result, and where."""
    if _is_tensor(made):
        yield path, made
    elif isinstance(made, tuple | list):
        for i, part in enumerate(made):
            yield from _parts(part, (*path, i))
    elif isinstance(made, dict):
        for key, part in made.items():
            yield from _parts(part, (*path, key))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _mapped(given: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with what the function gives for its elements."""
    each: Any = function  # typed for nodes of graphs
    return fx.node.map_aggregate(given, each)


def _tensors(given: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(given, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
