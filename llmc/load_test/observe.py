"""Runs the step's lowered graph op by op, timing each op and computing its work.

Times come from device events on a GPU, and from the host's clock on a CPU. If decode steps are
replayed (runner/step_recordings.py), each op is recorded and replayed separately.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.compiler.lower import StepFunction
from llmc.compiler.program import lowered
from llmc.errors import LlmcError
from llmc.kernels.cpu.recording import Recorded, record
from llmc.load_test.op_work import Call, RequestTokens, Work, work_of
from llmc.passes.inputs import Input, StepInput, WeightInput, input_of
from llmc.startup.start import Started

_KIND_OF = {
    **dict.fromkeys(("paged_attention", "rope_attention"), "attention"),
    **dict.fromkeys(("latent_attention", "rope_latent_attention"), "attention"),
    **dict.fromkeys(("choose_keys", "choose_blocks", "encoder_attention"), "attention"),
    **dict.fromkeys(("rope_write", "rope_write_latent", "write_kv"), "attention"),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "norm_add", "norm_add_norm"), "norm"),
    **dict.fromkeys(("gated_rms_norm", "layer_norm", "add_layer_norm"), "norm"),
    **dict.fromkeys(("process_logits", "ban_words", "sample", "sample_rows"), "sampler"),
    **dict.fromkeys(("delta_rule", "selective_scan", "linear_recurrence"), "recurrence"),
    **dict.fromkeys(("conv_delta_rule", "conv_scan"), "recurrence"),
    **dict.fromkeys(("decayed_softmax", "causal_conv", "running_max"), "recurrence"),
    **dict.fromkeys(("all_reduce", "all_gather", "first_rank"), "collective"),
}
_CYCLES_PER_S = 2e9  # approximate GPU clock, for a delay during which its queue is filled
NOT_COUNTED = 2  # first steps of a shape: one computes the work, one records or warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """All calls of an op in a step; for linears, those with the same weight name in each layer."""

    kind: str  # one of KINDS
    name: str
    num_calls: int
    seconds: float
    work: Work


def merged(kind: str, name: str, rows: Sequence[OpRow]) -> OpRow:
    return OpRow(
        kind=kind,
        name=name,
        num_calls=sum(row.num_calls for row in rows),
        seconds=sum(row.seconds for row in rows),
        work=Work(
            num_bytes=sum(row.work.num_bytes for row in rows),
            num_operations=sum(row.work.num_operations for row in rows),
        ),
    )


ShapeKey = tuple[tuple[int, int], ...]  # (new tokens, context) of each request


def _decode_key(num: int) -> ShapeKey:
    """The key of a decode step, without the context lengths, which grow from step to step."""
    return ((1, 0),) * num


@dataclass(slots=True, kw_only=True)
class _Shape:
    """Steps of one shape: the work of each op, and the seconds of each op by step."""

    works: dict[fx.Node, Work]
    seconds: list[list[float]]
    recorded: list[Recorded] | None = None
    keeps: fx.Interpreter | None = None  # the values that the recordings read
    result: Any = None


class ObservedStep:
    """The step's graph with each op timed. `replays`: decode steps run from recordings."""

    def __init__(self, started: Started, *, replays: bool) -> None:
        self._graph = lowered(started.model.program)
        self._bound = started.model.bound
        self._replays = replays
        self._is_cuda = started.model.program.device.type == "cuda"
        self._host_s = 0.0  # time to queue the last step on a GPU
        self._nodes = [n for n in self._graph.graph.nodes if n.op == "call_function"]
        self._labels = {node: _label(node) for node in self._nodes}
        self._shapes: dict[ShapeKey, _Shape] = {}
        roles = [(n.name, input_of(n)) for n in self._graph.graph.nodes if n.op == "placeholder"]
        self._inputs = [(name, r.name if isinstance(r, StepInput) else None) for name, r in roles]
        given = tuple(name for _, name in self._inputs if name is not None)
        self.step = StepFunction(call=self._call, inputs=given, source="")

    def rows(self, *, decode_of: int | None = None) -> list[OpRow]:
        """The rows of all steps so far, or of those that decoded `decode_of` requests. Then clears
        all steps."""
        by_label: defaultdict[tuple[str, str], list[OpRow]] = defaultdict(list)
        for key, shape in self._shapes.items():
            if decode_of is not None and key != _decode_key(decode_of):
                continue
            if len(shape.seconds) < NOT_COUNTED:
                continue
            for node, samples in zip(
                self._nodes, zip(*shape.seconds[1:], strict=True), strict=True
            ):
                work = shape.works[node]
                if _is_view(node) and work == Work():  # a reshape may copy instead
                    continue
                kind, name = self._labels[node]
                seconds = statistics.median(samples)
                by_label[kind, name].append(
                    OpRow(kind=kind, name=name, num_calls=1, seconds=seconds, work=work)
                )
        self._shapes = {}
        if not by_label:
            raise LlmcError(f"no step with {decode_of} decoding requests ran; please report this")
        return [merged(kind, name, rows) for (kind, name), rows in by_label.items()]

    def _call(self, **given: Tensor) -> Any:
        values = [given[own] if own else self._bound[name] for name, own in self._inputs]
        requests = _requests(given)
        key = tuple((r.new, r.context if r.new > 1 else 0) for r in requests)
        shape = self._shapes.get(key)
        if shape is None:
            counting = _Counting(self._graph, requests)
            result = counting.run(*values)
            self._shapes[key] = _Shape(works=counting.works, seconds=[])
            return result
        if self._is_cuda:
            return self._on_gpu(shape, values)
        if self._replays and all(r.new == 1 for r in requests):
            return self._replayed(shape, values)
        timing = _Timing(self._graph)
        result = timing.run(*values)
        shape.seconds.append(timing.seconds)
        return result

    def _replayed(self, shape: _Shape, values: Sequence[Any]) -> Any:
        if shape.recorded is None:
            recording = _Recording(self._graph)
            shape.result = recording.run(*values)
            shape.recorded, shape.keeps = recording.recorded, recording
            shape.seconds.append([0.0] * len(self._nodes))
            return shape.result
        seconds = []
        for recorded in shape.recorded:
            start = time.perf_counter()
            recorded.replay()
            seconds.append(time.perf_counter() - start)
        shape.seconds.append(seconds)
        return shape.result

    def _on_gpu(self, shape: _Shape, values: Sequence[Any]) -> Any:
        """Delay the device until the host has queued the step, so that no op waits for the host."""
        marking = _Marking(self._graph)
        torch.cuda._sleep(int(self._host_s * _CYCLES_PER_S))
        start = time.perf_counter()
        result = marking.run(*values)
        self._host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        shape.seconds.append(marking.seconds())
        return result


def _requests(given: Mapping[str, Tensor]) -> list[RequestTokens]:
    """The requests of the step, without padding."""
    starts, contexts = given["query_start"].tolist(), given["context_len"].tolist()
    return [
        RequestTokens(new=end - start, context=context)
        for start, end, context in zip(starts, starts[1:], contexts, strict=False)
        if context > 0 and end > start
    ]


class _Interpreter(fx.Interpreter):
    """Runs a graph and passes each call to `_do`."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self._do(n, args, kwargs)

    def _do(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Timing(_Interpreter):
    """Measures each call with the host's clock, which on a CPU is the duration of the call."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seconds: list[float] = []

    def _do(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        call: Any = getattr(n.target, "_op", n.target)
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return result


class _Marking(_Interpreter):
    """Records an event before the first call and after each call."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._events = [self._mark()]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _do(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        call: Any = n.target
        result = call(*args, **kwargs)
        self._events.append(self._mark())
        return result

    def seconds(self) -> list[float]:
        pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]


class _Recording(_Interpreter):
    """Records each call separately. Values are kept, because the recordings read them."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.recorded: list[Recorded] = []

    def _do(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        call: Any = n.target
        recorded = record(lambda: call(*args, **kwargs))
        self.recorded.append(recorded)
        return recorded.results


class _Counting(_Interpreter):
    """Computes the work of each call: bytes read and written, and operations."""

    def __init__(self, graph: fx.GraphModule, requests: Sequence[RequestTokens]) -> None:
        super().__init__(graph)
        self._requests = requests
        self._roles: dict[fx.Node, Input] = {}
        self.works: dict[fx.Node, Work] = {}

    def _do(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        call: Any = n.target
        result = call(*args, **kwargs)
        nodes, values = _by_name(n, n.args, n.kwargs), _by_name(n, args, kwargs)
        roles = {
            name: role
            for name, node in nodes.items()
            if isinstance(node, fx.Node) and (role := self._role(node)) is not None
        }
        if _is_view(n) and n.all_input_nodes:
            inherited = self._role(n.all_input_nodes[0])
            if inherited is not None:
                self._roles[n] = inherited
        self.works[n] = work_of(
            Call(
                name=_op_name(n),
                given=values,
                roles=roles,
                written=_written(n),
                result=result,
                requests=self._requests,
            )
        )
        return result

    def _role(self, node: fx.Node) -> Input | None:
        return input_of(node) or self._roles.get(node)


def _by_name(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    names += [str(place) for place in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(node: fx.Node) -> frozenset[str]:
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return frozenset(
        a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a call creates no new values: a view of its input, a tuple item, or a size."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    returned = [r.alias_info for r in schema.returns if str(r.type) != "int"]
    is_new = any(a is None or a.is_write for a in returned)
    return bool(schema.returns) and not is_new


def _op_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def _label(node: fx.Node) -> tuple[str, str]:
    """(kind, name) of the row to which the call belongs."""
    name = _op_name(node)
    if "linear" in name or name in ("mm", "addmm", "bmm"):
        parts = [p for source in node.all_input_nodes for p in _weight_names(source)]
        if parts:
            return "linear", _joined(parts)
    return _KIND_OF.get(name, "rest"), name


def _weight_names(node: fx.Node) -> tuple[str, ...]:
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    role = input_of(node)
    if isinstance(role, WeightInput) and (
        role.quantized is None or role.quantized.part == "weight"
    ):
        return tuple(part for part in role.parts if not part.endswith("bias"))
    return ()


def _joined(parts: Sequence[str]) -> str:
    """`model.layers.7.mlp.gate_proj.weight` and `...up_proj.weight`: `mlp.gate_proj+up_proj`."""
    names = list(dict.fromkeys(map(_in_layer, parts)))
    before = names[0].rpartition(".")[0]
    ends = [name.removeprefix(before + ".") if before else name for name in names]
    return (before + "." if before else "") + "+".join(ends)


def _in_layer(part: str) -> str:
    """A parameter's name within its layer; outside of layers, its last component."""
    name = part.removesuffix(".weight")
    own = re.sub(r"^.*\.\d+\.", "", name)
    return own if own != name else name.rpartition(".")[2]
