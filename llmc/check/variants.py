"""One captured model, made into step functions in many ways: passes off, kernels off, compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx

from llmc.check.reference import Run
from llmc.check.step import Geometry, bind, row_tables, run_steps
from llmc.check.taps import tap_buffers, tap_layers
from llmc.check.tokens import Chunk, TokenSequence
from llmc.compiler.build import BuiltModel
from llmc.compiler.capture import CapturedModel
from llmc.compiler.inductor import compile_step
from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import graph_weights
from llmc.kernels.quantized_linear import Part, Quantization
from llmc.kernels.registry import OPS
from llmc.passes.base import Pass, PassReport, run_passes
from llmc.passes.canonicalize import canonicalize
from llmc.passes.group_caches import cache_groups
from llmc.passes.lower_kernels import lower_kernels
from llmc.passes.pipeline import PipelineOptions, pipeline
from llmc.weights.load import WeightSource
from llmc.weights.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`switches` by pass, `kernels` the ops whose fast versions are used (None: all)."""

    switches: Mapping[str, bool]
    kernels: Collection[str] | None = None
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is checked, and the tokens it is checked on."""

    built: BuiltModel
    captured: CapturedModel
    parameters: Parameters
    open_source: Callable[[], WeightSource]  # a new one each time: converters run once
    options: PipelineOptions
    extra: tuple[Pass, ...]
    device: torch.device
    cache_dir: Path
    sequences: tuple[TokenSequence, ...]
    steps: Sequence[Sequence[Chunk]]

    @property
    def passes(self) -> tuple[Pass, ...]:
        return pipeline(self.options, self.extra)

    def geometry(self, graph: fx.GraphModule) -> Geometry:
        num_groups = max(1, len(cache_groups(graph.graph)))
        return Geometry.of(self.sequences, self.options.block_size, num_groups)

    def matches(self, p: Pass) -> bool:
        """Whether a pass changes anything in this model."""
        _, (_, report) = run_passes(self.captured.graph, (canonicalize(), p))
        return report.changed

    def rewrite(self, variant: Variant) -> tuple[fx.GraphModule, list[PassReport]]:
        """The graph after the passes and, last, with its kernels chosen."""
        graph, reports = run_passes(self.captured.graph, self.passes, variant.switches)
        return self._with_kernels(graph, variant.kernels), reports

    def run(self, variant: Variant) -> list[Tensor]:
        """Logits [T, V] of every sequence."""
        graph, _ = self.rewrite(variant)
        geometry = self.geometry(graph)
        bound = bind(graph, self._weights(graph), geometry, self.device)
        step = self._step(graph, bound, variant.level)
        args = (self.sequences, self.steps, geometry, self.captured.vocab_size, self.device)
        return run_steps(step, *args)[0]

    def run_tapped(self, variant: Variant) -> Run:
        """The same with a copy taken of what leaves each layer; not compiled."""
        most = max(sum(c.count for c in chunks) for chunks in self.steps)
        dtype = self.built.dtype
        # The tap is the last of the early passes: it sees what users' passes made of a layer.
        buffers = tap_buffers(self.captured.graph.graph, most, dtype, self.device)
        passes = pipeline(self.options, (*self.extra, tap_layers(buffers=buffers)))
        graph, _ = run_passes(self.captured.graph, passes, variant.switches)
        graph = self._with_kernels(graph, variant.kernels)
        geometry = self.geometry(graph)
        bound = bind(graph, self._weights(graph), geometry, self.device)
        args = (self.sequences, self.steps, geometry, self.captured.vocab_size, self.device)
        logits, hidden = run_steps(lower(graph, bound), *args, taps=buffers)
        return Run(logits=logits, hidden=hidden)

    def run_captured(self, passes: Sequence[Pass] = ()) -> list[Tensor]:
        """The captured graph itself, one sequence at a time: no paging, no fusion, no kernel."""
        graph, _ = run_passes(self.captured.graph, (canonicalize(), *passes))
        bound = bind(graph, self._weights(graph), self.geometry(graph), self.device)
        call = lower(graph, bound).call
        logits = []
        for sequence in self.sequences:
            ids = torch.tensor(sequence.token_ids, device=self.device)
            given = {"token_ids": ids, "positions": torch.arange(len(ids), device=self.device)}
            with torch.inference_mode():
                out: object = call(**given)
            assert isinstance(out, Tensor)
            logits.append(out[0].to("cpu", torch.float32, copy=True))
        return logits

    def _weights(self, graph: fx.GraphModule) -> dict[str, Tensor]:
        return graph_weights(
            graph,
            self.parameters,
            self.open_source(),
            dtype=self.built.dtype,
            device=self.device,
        )

    def _with_kernels(
        self, graph: fx.GraphModule, kernels: Collection[str] | None
    ) -> fx.GraphModule:
        """Fast versions of these ops only; the others stay on their references."""
        if kernels is not None and not kernels:
            return graph
        lowered, _ = run_passes(graph, (lower_kernels(),))
        if kernels is None:
            return lowered
        wanted = {OPS[name].overload for name in kernels}
        plain = [n.target for n in graph.graph.nodes]
        for node, target in zip(lowered.graph.nodes, plain, strict=True):
            if node.target is not target and target not in wanted:
                node.target = target
        lowered.recompile()
        return lowered

    def _step(self, graph: fx.GraphModule, bound: Mapping[str, Tensor], level: int) -> StepFunction:
        if level == 0:
            return lower(graph, bound)
        vocab_size, device = self.captured.vocab_size, self.device
        rows = row_tables(self.sequences, self.geometry(graph), vocab_size, device)
        return compile_step(graph, bound, rows.tables, level=level, cache_dir=self.cache_dir)


class RoundedWeights:
    """Another source's weights, rounded to a dtype before they are cast to the one asked for."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def check(self, names: Iterable[str]) -> None:
        self._source.check(names)

    def blocks(self, name: str, to: Quantization) -> dict[Part, Tensor]:
        return self._source.blocks(name, to)

    def fill(self, name: str, out: Tensor) -> None:
        rounded = torch.empty(out.shape, dtype=self._dtype, device=out.device)
        self._source.fill(name, rounded)
        out.copy_(rounded)


def kernels_of(graph: fx.GraphModule) -> dict[str, str]:
    """op -> the library that computes it, for every op of ours in a graph with chosen kernels."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("llmc"):
            library, name = str(node.target).split(".")[:2]
            found[name] = library.removeprefix("llmc").removeprefix("_") or "reference"
    return found
