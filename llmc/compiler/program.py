"""Config -> Program: build, capture and rewrite; then its weights, and every tensor bound.

The one module that knows the order of the compiler's stages.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from llmc.compiler.attention_fallback import build_any, build_plain, capture_any
from llmc.compiler.cache import CachedProgram, ProgramCache, program_key
from llmc.errors import CompileError
from llmc.passes.base import OUTLINE, Pass, PassReport, check_names, run_passes
from llmc.passes.group_caches import CacheGroup, cache_groups
from llmc.passes.inputs import CacheInput, ConstantInput, StateInput, WeightInput, input_of
from llmc.passes.logits_processors import LogitsProcessor
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.page_attention import CacheSpec
from llmc.passes.pipeline import PipelineOptions, pipeline
from llmc.passes.slot_state import StateSpec
from llmc.passes.user import users_digest
from llmc.weights.checkpoint import Readable
from llmc.weights.load import CheckpointWeights, DirectWeights, WeightSource, make_weights
from llmc.weights.parameters import Parameters, describe_parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A rewritten step graph without its tensors, and what is needed to give it some.

    Its ops are not yet lowered to implementations: see `lowered`.
    """

    graph: fx.GraphModule
    parameters: Parameters
    make_module: Callable[[], nn.Module]  # the module on meta; made at most once
    processors: tuple[LogitsProcessor, ...]  # of users; what they do is in the graph
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    caches: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]  # layers that share a block table
    states: tuple[StateSpec, ...]
    reports: tuple[PassReport, ...]
    from_cache: bool
    capture_note: str  # how its layers were captured, where that was done now
    keep: Callable[[], None]  # save it for the next start; call once it has proved itself

    @property
    def module(self) -> nn.Module:
        """The module on meta; building it imports the model's code, so warm starts go without."""
        return self.make_module()

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(group.num_layers for group in self.groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers. Where there are several groups, all caches have one shape."""
        total = sum(cache.bytes_per_token for cache in self.caches)
        return total * self.num_layers // max(1, len(self.caches))

    def weight_inputs(self) -> Iterator[tuple[fx.Node, WeightInput]]:
        for node in self.graph.graph.nodes:
            role = input_of(node)
            if isinstance(role, WeightInput):
                yield node, role


def compile_program(
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: PipelineOptions,
    switches: Mapping[str, bool],
    extra: Sequence[Pass] = (),
    processors: Sequence[LogitsProcessor] = (),
    cache: ProgramCache | None = None,
) -> Program:
    """Build, capture and rewrite; no weight is read. CompileError where the model can't be served.

    `extra` are passes of users, `processors` their logits processors. What an earlier start left in
    `cache` is used instead of capturing again.
    """
    passes = pipeline(options, extra, processors)
    check_names(switches, passes)
    make = functools.cache(lambda: build_any(config, dtype))
    named = users_digest(extra, processors)
    if named is None:  # no name tells what these make apart
        cache = None
    key = program_key(config, dtype, device, options, switches, named or "") if cache else ""
    entry = cache.load(key, device) if cache else None
    if entry is None:
        outline = switches.get(OUTLINE, True)
        plain = functools.partial(build_plain, config, dtype)
        captured = capture_any(make(), plain, device, outline=outline)
        graph, reports = run_passes(captured.graph, passes, switches)
        entry = CachedProgram(
            graph=graph,
            reports=tuple(reports),
            vocab_size=captured.vocab_size,
            parameters=describe_parameters(make().module),
        )
        found, note = False, captured.note
    else:
        graph, found, note = entry.graph, True, ""
    caches, states = _caches(graph), _states(graph)
    if not caches and not states:
        raise CompileError(
            "no attention and no recurrence was found in the model's graph, so nothing in it would "
            "see more than the newest token"
        )

    def keep() -> None:
        if cache is not None and not found:
            cache.save(key, entry)

    return Program(
        graph=graph,
        parameters=entry.parameters,
        make_module=lambda: make().module,
        processors=tuple(processors),
        vocab_size=entry.vocab_size,
        dtype=dtype,
        device=device,
        caches=caches,
        groups=cache_groups(graph.graph),
        states=states,
        reports=entry.reports,
        from_cache=found,
        capture_note=note,
        keep=keep,
    )


def lowered(program: Program) -> fx.GraphModule:
    """The graph with every op replaced by its fastest version that is there now."""
    graph, reports = run_passes(program.graph, (lower_kernels(),))
    log.debug("%s", reports[0])
    return graph


def _caches(graph: fx.GraphModule) -> tuple[CacheSpec, ...]:
    """Cache shapes from the placeholders."""
    parts: dict[int, dict[str, tuple[int, int]]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            _, heads, _, dim = node.meta["val"].shape
            parts.setdefault(role.layer, {})[role.part] = (int(heads), int(dim))
            dtypes[role.layer] = node.meta["val"].dtype
    return tuple(
        CacheSpec(
            layer=layer,
            kv_heads=part["key"][0],
            head_dim=part["key"][1],
            v_head_dim=part["value"][1],
            dtype=dtypes[layer],
        )
        for layer, part in sorted(parts.items())
    )


def _states(graph: fx.GraphModule) -> tuple[StateSpec, ...]:
    """State shapes from the placeholders, whose first dimension counts slots."""
    specs = []
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, StateInput):
            value = node.meta["val"]
            shape = tuple(int(n) for n in value.shape[1:])
            specs.append(StateSpec(call=role.call, op=role.op, shape=shape, dtype=value.dtype))
    return tuple(sorted(specs, key=lambda s: s.call))


def open_weights(program: Program, tensors: Mapping[str, Readable]) -> WeightSource:
    """The checkpoint's tensors as the program's parameters, by name where that is all it takes."""
    if program.parameters.is_plain:
        names = {part for _, role in program.weight_inputs() for part in role.parts}
        direct = DirectWeights(program.parameters, tensors)
        if direct.covers(names):
            return direct
    return CheckpointWeights(program.module, tensors)


def load_weights(program: Program, source: WeightSource) -> dict[str, Tensor]:
    """Every weight of the program in its final form, by placeholder name."""
    source.check(part for _, role in program.weight_inputs() for part in role.parts)
    return graph_weights(
        program.graph, program.parameters, source, dtype=program.dtype, device=program.device
    )


def graph_weights(
    graph: fx.GraphModule,
    parameters: Parameters,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """The same for any graph of a model. `dtype` is that of the model."""
    made: dict[WeightInput, Tensor] = {}
    weights = {}
    for node in graph.graph.nodes:
        role = input_of(node)
        if not isinstance(role, WeightInput):
            continue
        if role not in made:
            own = dtype if role.quantized else node.meta["val"].dtype
            made |= make_weights(role, parameters.shapes, own, source, device)
        weights[node.name] = made[role]
    return weights


def bind(
    program: Program,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
    states: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """The tensor of every placeholder that is no step input.

    `caches[layer]` is (key, value); `states` are in the order of the program's.
    """
    slots = {spec.call: state for spec, state in zip(program.states, states, strict=True)}
    bound: dict[str, Tensor] = dict(weights)
    for node in program.graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            bound[node.name] = caches[role.layer][0 if role.part == "key" else 1]
        elif isinstance(role, StateInput):
            bound[node.name] = slots[role.call]
        elif isinstance(role, ConstantInput):
            bound[node.name] = role.tensor.to(program.device)
    return bound
