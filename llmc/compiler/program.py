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

from llmc.compiler.build import build as build_module
from llmc.compiler.cache import CachedProgram, ProgramCache, program_key
from llmc.compiler.capture import capture
from llmc.compiler.checkpoint import StoredTensor
from llmc.compiler.parameters import Parameters, describe_parameters
from llmc.compiler.weights import CheckpointWeights, DirectWeights, WeightSource, make_weight
from llmc.errors import CompileError
from llmc.passes.base import PassReport, check_names, run_passes
from llmc.passes.inputs import CacheInput, ConstantInput, WeightInput, input_of
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.page_attention import CacheSpec
from llmc.passes.pipeline import PipelineOptions, pipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A rewritten step graph without its tensors, and what is needed to give it some.

    Its ops are not yet lowered to implementations: see `lowered`.
    """

    graph: fx.GraphModule
    parameters: Parameters
    make_module: Callable[[], nn.Module]  # the module on meta; made at most once
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    caches: tuple[CacheSpec, ...]
    reports: tuple[PassReport, ...]
    from_cache: bool
    keep: Callable[[], None]  # save it for the next start; call once it has proved itself

    @property
    def module(self) -> nn.Module:
        """The module on meta; building it imports the model's code, so warm starts go without."""
        return self.make_module()

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
    cache: ProgramCache | None = None,
) -> Program:
    """Build, capture and rewrite; no weight is read. CompileError where the model can't be served.

    What an earlier start left in `cache` is used instead of capturing again.
    """
    passes = pipeline(options)
    check_names(switches, passes)
    make = functools.cache(lambda: build_module(config, dtype))
    key = program_key(config, dtype, device, options, switches) if cache else ""
    entry = cache.load(key, device) if cache else None
    if entry is None:
        captured = capture(make(), device)
        graph, reports = run_passes(captured.graph, passes, switches)
        entry = CachedProgram(
            graph=graph,
            reports=tuple(reports),
            vocab_size=captured.vocab_size,
            parameters=describe_parameters(make().module),
        )
        found = False
    else:
        graph, found = entry.graph, True
    caches = _caches(graph)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", len(caches))
    if len(caches) != layers:
        raise CompileError(
            f"the graph has {len(caches)} attention calls and config.json {layers} layers: layers "
            "that are no attention (recurrent, convolution) can't be served yet"
        )

    def keep() -> None:
        if cache is not None and not found:
            cache.save(key, entry)

    return Program(
        graph=graph,
        parameters=entry.parameters,
        make_module=lambda: make().module,
        vocab_size=entry.vocab_size,
        dtype=dtype,
        device=device,
        caches=caches,
        reports=entry.reports,
        from_cache=found,
        keep=keep,
    )


def lowered(program: Program, prefer: Sequence[str] = ("triton", "cpu")) -> fx.GraphModule:
    """The graph with every op replaced by its fastest version that is there now."""
    graph, reports = run_passes(program.graph, (lower_kernels(prefer=prefer),))
    log.info("%s", reports[0])
    return graph


def _caches(graph: fx.GraphModule) -> tuple[CacheSpec, ...]:
    """Cache shapes from the placeholders; windows are in the attention calls' arguments."""
    parts: dict[int, dict[str, tuple[int, int]]] = {}
    limits: dict[int, tuple[int, int]] = {}
    for node in graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            _, heads, _, dim = node.meta["val"].shape
            parts.setdefault(role.layer, {})[role.part] = (int(heads), int(dim))
        if node.op == "call_function" and "paged_attention" in str(node.target):
            owner = input_of(node.args[1])
            assert isinstance(owner, CacheInput)
            limits[owner.layer] = (int(node.args[7]), int(node.args[8]))
    return tuple(
        CacheSpec(
            layer=layer,
            kv_heads=part["key"][0],
            head_dim=part["key"][1],
            v_head_dim=part["value"][1],
            window=limits[layer][0],
            chunk=limits[layer][1],
        )
        for layer, part in sorted(parts.items())
    )


def open_weights(program: Program, tensors: Mapping[str, StoredTensor]) -> WeightSource:
    """The checkpoint's tensors as the program's parameters, by name where that is all it takes."""
    if program.parameters.is_plain:
        names = {part for _, role in program.weight_inputs() for part in role.parts}
        direct = DirectWeights(program.parameters, tensors)
        if direct.covers(names):
            return direct
    return CheckpointWeights(program.module, tensors)


def load_weights(program: Program, source: WeightSource) -> dict[str, Tensor]:
    """Every weight of the program in its final form, by placeholder name."""
    roles = list(program.weight_inputs())
    source.check(part for _, role in roles for part in role.parts)
    made: dict[WeightInput, Tensor] = {}
    weights = {}
    for node, role in roles:
        if role not in made:
            dtype = node.meta["val"].dtype
            made[role] = make_weight(role, program.parameters.shapes, dtype, source, program.device)
        weights[node.name] = made[role]
    return weights


def bind(
    program: Program,
    weights: Mapping[str, Tensor],
    caches: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """The tensor of every placeholder that is no step input; `caches[layer]` is (key, value)."""
    bound: dict[str, Tensor] = dict(weights)
    for node in program.graph.graph.nodes:
        role = input_of(node)
        if isinstance(role, CacheInput):
            bound[node.name] = caches[role.layer][0 if role.part == "key" else 1]
        elif isinstance(role, ConstantInput):
            bound[node.name] = role.tensor.to(program.device)
    return bound
