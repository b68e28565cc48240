"""Two recordings of a block's code -> code for any number of tokens, with all experts at once.

Only what the result needs is kept: of the loop, nothing. Sizes that differ between the recordings
must be linear in the number of tokens. One recording is in float64 or bfloat16, where the model's
dtype is meant, and the other in float32; a dtype that is the same in both is meant as such.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from llmc.compiler.expert_blocks.find import Analysis
from llmc.compiler.expert_blocks.record import (
    Call,
    NotUnderstood,
    Recording,
    Value,
    inner_values,
)
from llmc.compiler.expert_blocks.routing import Routing, combined

_OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__eq__": operator.eq,
    "__invert__": operator.invert,
    "__and__": operator.and_,
    "__or__": operator.or_,
}


@dataclass(frozen=True, slots=True)
class Size:
    """factor * tokens + shift"""

    factor: int
    shift: int


class ModelDtype:
    """The dtype of the block's input."""


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module or function that is itself an argument of the code."""
    return function(*args, **kwargs)


def emit_function(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> Any:
    """A call of a function or method of torch."""
    name = target.__name__
    if name == "__get__":  # an attribute, such as x.T
        return graph.call_function(getattr, (args[0], target.__self__.__name__))
    if name in _OPERATORS:
        made = graph.call_function(_OPERATORS[name], args, kwargs)
        return args[0] if name == "__setitem__" else made
    if getattr(Tensor, name, None) is target:
        return graph.call_method(name, args, kwargs)
    return graph.call_function(target, args, kwargs)


def generalize(
    analyses: tuple[Analysis, Analysis], routing: Routing, results: tuple[Value, Value]
) -> fx.GraphModule:
    """-> code (block, hidden [..., T, D], experts) of the block's result. experts: see `Experts`.

    Raises NotUnderstood.
    """
    pair = Pair(*(analysis.recording for analysis in analyses))
    for value in (routing.rows, routing.expert, routing.weight, *routing.extras):
        if value is not None:
            pair.unify(value, value)
    one, other = (analysis.recording.result for analysis in analyses)
    pair.done[results[0]] = results[1]
    result = pair.argument(one, other)
    likes = (a.recording.read[value] for a, value in zip(analyses, results, strict=True))
    like = pair.argument(*((tuple(x.shape), x.dtype) for x in likes))
    return _Emitter(pair, routing, results[0]).emit(result, like)


class Pair:
    """Two recordings, and which of their values are the same computation."""

    def __init__(self, first: Recording, second: Recording) -> None:
        self.first, self.second = first, second
        self.done: dict[Value, Value] = {}
        self.calls: dict[int, Call] = {}  # those needed of the first, with general arguments

    def unify(self, one: Value, other: Value) -> None:
        if one in self.done:
            if self.done[one] != other:
                raise NotUnderstood("its code differs with the number of tokens")
            return
        # a loop over the experts that were hit changes its result once for each
        if one.path != other.path or bool(one.changes) != bool(other.changes):
            raise NotUnderstood("its code differs with the number of tokens")
        self.done[one] = other
        source, other_source = self.first.source(one), self.second.source(other)
        if source is None or other_source is None:
            raise NotUnderstood("its code changes a part of a tensor in place")
        if source.kind in ("unknown", "expert"):
            raise NotUnderstood("it computes with a tensor of unknown origin")
        if (source.kind, source.target) != (other_source.kind, other_source.target):
            raise NotUnderstood("its code differs with the number of tokens")
        index = one.changes[-1] if one.changes else one.call
        self.calls[index] = Call(
            kind=source.kind,
            target=source.target,
            args=self.argument(source.args, other_source.args),
            kwargs=self.argument(source.kwargs, other_source.kwargs),
        )

    def argument(self, one: Any, other: Any) -> Any:
        """An argument of any number of tokens."""
        if isinstance(one, Value) and isinstance(other, Value):
            self.unify(one, other)
            return one
        if type(one) is not type(other):
            raise NotUnderstood("its code differs with the number of tokens")
        if isinstance(one, tuple | list) and len(one) == len(other):
            each = [self.argument(a, b) for a, b in zip(one, other, strict=True)]
            return each if isinstance(one, list) else tuple(each)
        if isinstance(one, dict) and one.keys() == other.keys():
            return {key: self.argument(one[key], other[key]) for key in one}
        if isinstance(one, slice):
            ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
            return slice(*(self.argument(a, b) for a, b in ends))
        if isinstance(one, torch.dtype):
            is_models = (one, other) == (self.first.dtype, self.second.dtype)
            return ModelDtype() if is_models else self._same(one, other)
        if isinstance(one, int) and not isinstance(one, bool) and one != other:
            return self._size(one, other)
        return self._same(one, other)

    def _same(self, one: Any, other: Any) -> Any:
        if one is not other and one != other:
            raise NotUnderstood("its code computes with numbers that it read out of tensors")
        return one

    def _size(self, one: int, other: int) -> Size:
        few, many = self.first.tokens, self.second.tokens
        factor, rest = divmod(other - one, many - few)
        if rest:
            raise NotUnderstood("its code computes with numbers that it read out of tensors")
        return Size(factor, one - factor * few)


class _Emitter:
    def __init__(self, pair: Pair, routing: Routing, result: Value) -> None:
        self._pair, self._routing, self._result = pair, routing, result
        self._graph = fx.Graph()
        self._block, self._hidden, self._experts = (
            self._graph.placeholder(name) for name in ("block", "hidden", "experts")
        )
        self._made: dict[int, Any] = {}  # the results of calls
        self._combined: fx.Node | None = None
        self._tokens: fx.Node | None = None
        self._attributes: dict[str, fx.Node] = {}

    def emit(self, result: Any, like: tuple[Any, Any]) -> fx.GraphModule:
        """`like`: the shape and dtype of the experts' combined results."""
        depends = self._pair.first.depends
        before: list[tuple[int, Call]] = []
        after: list[tuple[int, Call]] = []
        for index in sorted(self._pair.calls):
            found = self._pair.calls[index]
            later = any(map(depends, inner_values(found)))
            (after if later else before).append((index, found))
        for index, found in before:
            self._call(index, found)
        self._combined = self._combine(*like)
        for index, found in after:
            self._call(index, found)
        self._graph.output(self._argument(result))
        self._graph.lint()
        return fx.GraphModule(nn.Module(), self._graph)

    def _combine(self, shape: Any, dtype: Any) -> fx.Node:
        routing, graph = self._routing, self._graph
        values = (routing.rows, routing.expert, routing.weight)
        given = [v if v is None else self._argument(v) for v in values]
        extras = [self._argument(extra) for extra in routing.extras]
        made = graph.call_function(
            combined, (self._experts, *given, extras, routing.is_dense, routing.sums)
        )
        made = graph.call_method("reshape", (made, self._argument(shape)))
        return graph.call_method("to", (made, self._argument(dtype)))

    def _call(self, index: int, found: Call) -> None:
        args, kwargs = self._argument(found.args), self._argument(found.kwargs)
        graph = self._graph
        if found.kind == "input":
            self._made[index] = self._hidden
        elif found.kind == "attribute":
            self._made[index] = self._attribute(found.target)
        elif found.kind == "module":
            module = self._attribute(found.target)
            self._made[index] = graph.call_function(call, (module, *args), kwargs)
        else:
            self._made[index] = emit_function(graph, found.target, args, kwargs)

    def _attribute(self, name: str) -> fx.Node:
        if name not in self._attributes:
            parts = name.split(".")
            self._attributes[name] = reduce(
                lambda owner, part: self._graph.call_function(getattr, (owner, part)),
                parts,
                self._block,
            )
        return self._attributes[name]

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Value):
            if given == self._result:
                return self._combined
            made = self._made[given.changes[-1] if given.changes else given.call]
            for step in () if given.changes else given.path:
                made = self._graph.call_function(operator.getitem, (made, step))
            return made
        if isinstance(given, Size):
            if self._tokens is None:
                self._tokens = self._graph.call_method("size", (self._hidden, -2))
            size = self._graph.call_function(operator.mul, (self._tokens, given.factor))
            return self._graph.call_function(operator.add, (size, given.shift))
        if isinstance(given, ModelDtype):
            return self._graph.call_function(getattr, (self._hidden, "dtype"))
        if isinstance(given, torch.device):
            return self._graph.call_function(getattr, (self._hidden, "device"))
        if isinstance(given, tuple | list):
            return type(given)(map(self._argument, given))
        if isinstance(given, dict):
            return {key: self._argument(value) for key, value in given.items()}
        if isinstance(given, slice):
            return slice(*map(self._argument, (given.start, given.stop, given.step)))
        return given
