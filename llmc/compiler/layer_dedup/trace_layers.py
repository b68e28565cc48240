"""Finds which decoder layers of a model are the same by running it once on meta, at full depth.

Each layer's forward is compiled by Dynamo with a backend that only records. If a layer passes the
guards of an earlier layer's trace, then by torch's own criterion it would be traced to the same
graph. Ops around the layers are recorded one by one, so that outline.py can compare them with a run
of fewer layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.compiler.recurrent import replaced_functions
from llmc.compiler.traceable import traceable_torch
from llmc.pooling import LM, Head

_EXAMPLE_TOKENS = 19  # as in capture


class LayersDiffer(Exception):
    """The layers of a model can't be captured once and repeated; the message says why."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer: the trace whose guards it passed, its arguments, and its inputs.

    `given` describes the arguments without naming the layer. `read[i]` is this layer's tensor for
    the i-th input of the trace: a parameter, a buffer, or a value computed earlier.
    """

    layer: int
    trace: int
    given: str
    read: tuple[Any, ...]


@dataclass(slots=True)
class ModelTrace:
    """Layer calls in order, and the ops before, between and after them."""

    calls: list[LayerCall] = field(default_factory=list)
    ops: list[list[str]] = field(default_factory=lambda: [[]])  # one list more than calls


class LayerTracer:
    """Runs `model` on meta. Traces are kept from one run to the next."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], most_traces: int, head: Head = LM
    ) -> None:
        self._model = model
        self._head = head
        self._index = {id(layer): i for i, layer in enumerate(layers)}
        self._most_traces = most_traces
        self._names = {
            id(t): name
            for named in (model.named_parameters, model.named_buffers)
            for name, t in named(remove_duplicate=False)
        }
        self._outputs: list[list[Tensor]] = []  # of each trace, to be returned again
        self._last: tuple[int, tuple[Any, ...]] = (-1, ())
        self._notes: _Notes = _Notes({})

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside this context, the layers are compiled. Resets Dynamo before and after."""
        classes = {type(m) for m in self._model.modules() if id(m) in self._index}
        torch._dynamo.reset()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(replaced_functions(self._model))
            stack.enter_context(traceable_torch())
            stack.enter_context(
                torch._dynamo.config.patch(
                    specialize_float=True, recompile_limit=self._most_traces + 1
                )
            )
            # as Dynamo would set it for the code around the layers
            stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
            for cls in classes:
                stack.enter_context(mock.patch.object(cls, "forward", self._stand_in(cls.forward)))
            try:
                yield
            finally:
                torch._dynamo.reset()

    def run(self) -> ModelTrace:
        """Run the model. Raises LayersDiffer if its code does not run this way."""
        self._notes = _Notes(self._names)
        ids = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.long, device="meta")
        given = {"input_ids": ids}
        if "position_ids" in inspect.signature(self._model.forward).parameters:
            shape = self._head.position_shape(_EXAMPLE_TOKENS)
            given["position_ids"] = torch.zeros(*shape, dtype=torch.long, device="meta")
        for name, tensor in given.items():
            self._notes.label(tensor, name)
        try:
            with self._notes:
                self._model(**given, use_cache=False)
        except LayersDiffer:
            raise
        except Exception as e:  # from the model's code: the full capture reports what is wrong
            first = (str(e).strip().splitlines() or [""])[0][:200]
            raise LayersDiffer(f"tracing it raised {type(e).__name__}: {first}") from e
        return self._notes.trace

    def _stand_in(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(forward, backend=self._record_trace, fullgraph=True, dynamic=True)

        def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(layer) not in self._index:
                raise LayersDiffer(f"a {type(layer).__name__} is called outside the list of layers")
            given = self._notes.describe((args, kwargs))
            with self._notes.paused():
                out = compiled(layer, *args, **kwargs)
            trace, read = self._last
            if trace >= self._most_traces:
                raise LayersDiffer(f"{trace + 1} of them differ")
            self._notes.layer_called(LayerCall(self._index[id(layer)], trace, given, read), out)
            return out

        return run_layer

    def _record_trace(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        trace = len(self._outputs)
        self._outputs.append([])

        def replay(*read: Any) -> Any:
            self._last = (trace, read)
            if not self._outputs[trace]:
                self._outputs[trace] = list(gm(*read))
            return [
                torch.empty_like(o) if isinstance(o, Tensor) else o for o in self._outputs[trace]
            ]

        return replay


class _Notes(TorchDispatchMode):
    """Records every op outside the layers, with its tensors named by their origin."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = ModelTrace()
        self._labels = dict(names)
        self._made_by: dict[int, int] = {}  # a layer's output -> its call
        self._alive: list[Any] = []  # so that no id is used twice
        self._num_ops = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the dispatch mode, under which Dynamo does not trace."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        said = f"{func}{self.describe((args, kwargs or {}))}"
        out = func(*args, **(kwargs or {}))
        self.trace.ops[-1].append(said)
        for i, tensor in enumerate(_tensors(out)):
            if id(tensor) not in self._labels and id(tensor) not in self._made_by:
                self.label(tensor, f"op {self._num_ops}.{i}")
        self._num_ops += 1
        return out

    def label(self, tensor: Tensor, text: str) -> None:
        self._labels[id(tensor)] = text
        self._alive.append(tensor)

    def layer_called(self, call: LayerCall, out: Any) -> None:
        for tensor in _tensors(out):
            self._made_by[id(tensor)] = len(self.trace.calls)
            self._alive.append(tensor)
        self.trace.calls.append(call)
        self.trace.ops.append([])

    def describe(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({', '.join(self.describe(v) for v in value)})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{k}={self.describe(v)}' for k, v in value.items())})"
        if value is None or isinstance(
            value, bool | int | float | str | torch.dtype | torch.device | torch.layout
        ):
            return repr(value)
        self._alive.append(value)
        return f"{type(value).__name__} {id(value)}"

    def _describe_tensor(self, tensor: Tensor) -> str:
        if id(tensor) in self._made_by:
            call = self._made_by[id(tensor)]
            is_last = call == len(self.trace.calls) - 1
            return "<the last layer's>" if is_last else f"<layer call {call}'s>"
        if id(tensor) not in self._labels:  # made by code that no dispatch mode sees
            raise LayersDiffer("the origin of a tensor is unknown")
        return f"<{self._labels[id(tensor)]}>"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
