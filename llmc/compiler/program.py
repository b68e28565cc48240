"""The step's graph as data: captured graph -> Program -> tensors for all of its inputs.

    CapturedModel --rewrite--> Program --load_weights--> weights --bind--> every tensor of the step

Nothing here imports transformers or Dynamo, so a start with a cached program needs neither.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from llmc.kernels.cache_dtype import block_tokens
from llmc.kernels.cpu.pages import HugePages
from llmc.passes.base import OUTLINE, Pass, PassReport, check_names, op_name, run_passes
from llmc.passes.group_caches import CacheGroup, cache_groups
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    StateInput,
    TapInput,
    WeightInput,
    input_of,
)
from llmc.passes.logits_processors import LogitsProcessor
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.options import PipelineOptions
from llmc.passes.page_attention import CacheSpec
from llmc.passes.slot_state import StateSpec
from llmc.pooling import LM, Head
from llmc.weights.checkpoint import Readable
from llmc.weights.load import CheckpointWeights, DirectWeights, WeightSource, make_weights
from llmc.weights.parameters import Parameters

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

_MAX_THREADS = 4  # that read weights: each needs memory to unpack one, and may use all cores
NONE_GIVEN: Mapping[WeightInput, Tensor] = MappingProxyType({})  # weights loaded earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """The graph of token_ids [T], positions [T] -> logits [1, T, vocab], with placeholder roles."""

    graph: fx.GraphModule
    parameters: Parameters
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    note: str = ""  # how the layers were captured


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteOptions:
    """What the passes need to know about the engine, and which passes run."""

    pipeline: PipelineOptions
    switches: Mapping[str, bool]
    extra: tuple[Pass, ...] = ()  # users' passes
    processors: tuple[LogitsProcessor, ...] = ()  # users' logits processors
    head: Head = LM  # of the captured model

    @property
    def passes(self) -> tuple[Pass, ...]:
        from llmc.passes.pipeline import pipeline  # not needed for a cached program

        return pipeline(self.pipeline, self.extra, self.processors)

    @property
    def outline(self) -> bool:
        """Whether repeated layers are captured only once."""
        return self.switches.get(OUTLINE, True)

    def check(self) -> None:
        """Raise ConfigError for a switch that names an unknown pass or disables a required one."""
        if self.switches:
            check_names(self.switches, self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A rewritten step graph without tensors, and what is needed to bind some to it.

    Its ops are not lowered to implementations yet: see `lowered`.
    """

    graph: fx.GraphModule
    parameters: Parameters
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    caches: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]  # layers that share a block table
    states: tuple[StateSpec, ...]
    reports: tuple[PassReport, ...]
    processors: tuple[LogitsProcessor, ...] = ()  # users', already part of the graph
    single_sequence: bool = (
        False  # some attention was not found, and attends to all tokens of a step
    )
    capture_note: str = ""  # how the layers were captured, if this start captured them
    from_cache: bool = False

    @staticmethod
    def of(
        graph: fx.GraphModule,
        *,
        parameters: Parameters,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        reports: Sequence[PassReport],
    ) -> Program:
        """A program with the caches and states that the graph's placeholders need."""
        return Program(
            graph=graph,
            parameters=parameters,
            vocab_size=vocab_size,
            dtype=dtype,
            device=device,
            caches=_caches(graph),
            groups=cache_groups(graph.graph),
            states=_states(graph),
            reports=tuple(reports),
        )

    @property
    def tap_shapes(self) -> list[tuple[int, ...]]:
        """For a draft head: block shapes of the target model's caches that it reads."""
        roles = ((input_of(node), node) for node in self.graph.graph.nodes)
        shapes = {r.number: n.meta["val"].shape[1:] for r, n in roles if isinstance(r, TapInput)}
        return [tuple(int(n) for n in shapes[number]) for number in sorted(shapes)]

    @property
    def keeps_low_bits(self) -> bool:
        """Whether ops read low-bit weights, which their references dequantize at every call."""
        return any(".quantized_" in op_name(node) for node in self.graph.graph.nodes)

    @property
    def vector_size(self) -> int:
        """Size of a pooled vector; for a program that samples, the width of its logits."""
        made: Any = self.graph.graph.output_node().args[0]
        return int(made[1].meta["val"].shape[-1])

    @property
    def num_layers(self) -> int:
        """Number of layers with a KV cache."""
        return sum(group.num_layers for group in self.groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers. With several groups, all caches have the same shape."""
        total = sum(cache.bytes_per_token for cache in self.caches)
        if len(self.groups) <= 1:
            return total
        return total * self.num_layers // len(self.caches)

    def weight_inputs(self) -> Iterator[tuple[fx.Node, WeightInput]]:
        for node in self.graph.graph.nodes:
            role = input_of(node)
            if isinstance(role, WeightInput):
                yield node, role

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights before they are loaded, of a rank in a tensor-parallel engine."""
        values = {role: node.meta["val"] for node, role in self.weight_inputs()}
        return sum(math.prod(v.shape) * v.dtype.itemsize for v in values.values())

    def adapter_inputs(self) -> Iterator[tuple[fx.Node, AdapterInput]]:
        for node in self.graph.graph.nodes:
            role = input_of(node)
            if isinstance(role, AdapterInput):
                yield node, role

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the slots for LoRA adapters."""
        values = (node.meta["val"] for node, _ in self.adapter_inputs())
        return sum(math.prod(v.shape) * v.dtype.itemsize for v in values)


OnPass = Callable[[Pass, fx.GraphModule, PassReport], None]


def rewrite(
    captured: CapturedModel, options: RewriteOptions, on_pass: OnPass | None = None
) -> Program:
    """Apply the passes to a copy of the captured graph.

    `on_pass` is called after each pass, with the pass, a copy of the graph and the report.
    """
    from llmc.passes.find_attention import spells_attention

    options.check()
    if on_pass is None:
        graph, reports = run_passes(captured.graph, options.passes, options.switches)
    else:
        graph, reports = captured.graph, []
        for p in options.passes:
            switch = {p.name: p.is_on(options.switches)}
            graph, found = run_passes(graph, (p,), switch)
            on_pass(p, graph, found[0])
            reports += found
    program = Program.of(
        graph,
        parameters=captured.parameters,
        vocab_size=captured.vocab_size,
        dtype=captured.dtype,
        device=captured.device,
        reports=reports,
    )
    return replace(
        program,
        processors=options.processors,
        single_sequence=spells_attention(graph),
        capture_note=captured.note,
    )


def lowered(program: Program) -> fx.GraphModule:
    """The graph with every op replaced by the fastest implementation that is available now."""
    graph, reports = run_passes(program.graph, (lower_kernels(),))
    log.debug("%s", reports[0])
    return graph


def _caches(graph: fx.GraphModule) -> tuple[CacheSpec, ...]:
    """Cache shapes, read from the placeholders."""
    parts: dict[int, dict[str, tuple[CacheInput, Tensor]]] = {}
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            parts.setdefault(role.layer, {})[role.part] = (role, node.meta["val"])
    return tuple(_cache_spec(layer, part) for layer, part in sorted(parts.items()))


def _cache_spec(layer: int, parts: dict[str, tuple[CacheInput, Tensor]]) -> CacheSpec:
    role, key = parts["key"]
    value_shape = parts["value"][1].shape if "value" in parts else (*key.shape[:3], 0)
    # blocks with more rows than tokens
    tokens = role.tokens or (block_tokens(key) if key.dtype == torch.int8 else 0)
    return CacheSpec(
        layer=layer,
        kv_heads=int(key.shape[1]),
        head_dim=int(key.shape[3]),
        v_head_dim=int(value_shape[3]),
        dtype=key.dtype,
        rows=int(key.shape[2]) if tokens else 1,
        v_rows=int(value_shape[2]) if tokens else 1,
        tokens=tokens or 1,
    )


def _states(graph: fx.GraphModule) -> tuple[StateSpec, ...]:
    """State shapes, read from the placeholders, whose first dimension is the number of slots."""
    specs = []
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, StateInput):
            value = node.meta["val"]
            shape = tuple(int(n) for n in value.shape[1:])
            specs.append(StateSpec(call=role.call, op=role.op, shape=shape, dtype=value.dtype))
    return tuple(sorted(specs, key=lambda s: s.call))


def open_weights(
    program: Program,
    tensors: Mapping[str, Readable],
    make_module: Callable[[], nn.Module],
    given: Mapping[WeightInput, Tensor] = NONE_GIVEN,
) -> DirectWeights | CheckpointWeights:
    """The checkpoint's tensors as the program's parameters.

    They are matched by name if that is enough. Otherwise transformers' conversion rules are
    applied, which need the model's module (on meta).
    """
    if program.parameters.is_plain:
        wanted = (role for _, role in program.weight_inputs() if role not in given)
        names = {part for role in wanted for part in role.parts}
        direct = DirectWeights(program.parameters, tensors)
        if direct.covers(names):
            return direct
    return CheckpointWeights(make_module(), tensors)


def load_weights(
    program: Program,
    source: WeightSource,
    rank: int = 0,
    given: Mapping[WeightInput, Tensor] = NONE_GIVEN,
) -> dict[str, Tensor]:
    """Load every weight of the program in its final form, by placeholder name; of sharded weights,
    this rank's part. Weights in `given` are not read."""
    wanted = (role for _, role in program.weight_inputs() if role not in given)
    source.check(part for role in wanted for part in role.parts)
    return graph_weights(
        program.graph,
        program.parameters,
        source,
        dtype=program.dtype,
        device=program.device,
        rank=rank,
        given=given,
    )


def graph_weights(
    graph: fx.GraphModule,
    parameters: Parameters,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int = 0,
    given: Mapping[WeightInput, Tensor] = NONE_GIVEN,
) -> dict[str, Tensor]:
    """`load_weights` for any graph of a model. `dtype` is the model's."""
    placeholders: dict[str, WeightInput] = {}
    readings: dict[WeightInput, tuple[WeightInput, torch.dtype]] = {}
    for node in graph.graph.nodes:
        role = input_of(node)
        if not isinstance(role, WeightInput):
            continue
        placeholders[node.name] = role
        if role not in given:
            own = dtype if role.quantized else node.meta["val"].dtype
            readings.setdefault(_reading(role), (role, own))

    memory = HugePages(device)

    def make(reading: tuple[WeightInput, torch.dtype]) -> dict[WeightInput, Tensor]:
        role, own = reading
        return make_weights(role, parameters.shapes, own, source, memory, rank)

    made = dict(given)
    is_concurrent = source.is_thread_safe and device.type == "cpu"
    threads = min(_MAX_THREADS, torch.get_num_threads()) if is_concurrent else 1
    for parts in _in_threads(threads, make, readings.values()):
        made |= parts
    return {name: made[role] for name, role in placeholders.items()}


def _in_threads(count: int, do: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """The results of `do` in order. With one thread it is this one, which has its rank's GPU as its
    current device; a new thread has the first."""
    if count == 1:
        yield from map(do, items)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="llmc-weights") as pool:
        yield from pool.map(do, items)


def _reading(role: WeightInput) -> WeightInput:
    """Identical for all parts of a quantized weight, which are loaded together."""
    if role.quantized is None:
        return role
    return replace(role, quantized=replace(role.quantized, part="weight"))


def bind(
    program: Program,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
    states: Sequence[Tensor] = (),
    rank: int = 0,
    taps: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """The tensor of every placeholder that is not a step input, on this rank.

    `caches[layer]` is (key, value); `states` are in the program's order. Adapter slots that are not
    in `weights` are created here, empty. `taps` are caches of a draft head's target model.
    """
    slots = {spec.call: state for spec, state in zip(program.states, states, strict=True)}
    bound: dict[str, Tensor] = dict(weights)
    for node in program.graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            bound[node.name] = caches[role.layer][0 if role.part == "key" else 1]
        elif isinstance(role, StateInput):
            bound[node.name] = slots[role.call]
        elif isinstance(role, TapInput):
            bound[node.name] = taps[role.number]
        elif isinstance(role, AdapterInput) and node.name not in bound:
            value = node.meta["val"]
            bound[node.name] = torch.zeros(
                tuple(value.shape), dtype=value.dtype, device=program.device
            )
        elif isinstance(role, ConstantInput):
            tensor = role.tensor if role.shard is None else role.shard.of(role.tensor, rank)
            bound[node.name] = tensor.to(program.device)
    return bound
