"""Turns one captured model into step functions in many ways: passes off, kernels off, compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from llmc.check.masks import show_masks
from llmc.check.reference import Run
from llmc.check.step import Geometry, bind, row_tables, run_steps
from llmc.check.taps import tap_buffers, tap_layers
from llmc.check.tokens import Chunk, TokenSequence
from llmc.compiler.build import BuiltModel
from llmc.compiler.inductor import compile_step
from llmc.compiler.lower import StepFunction, lower
from llmc.compiler.program import (
    CapturedModel,
    Program,
    RewriteOptions,
    graph_weights,
    rewrite,
)
from llmc.kernels.expert_linear import expert_linear
from llmc.kernels.quantized_linear import Quantization
from llmc.kernels.registry import OPS
from llmc.passes.base import Pass, run_passes
from llmc.passes.canonicalize import canonicalize
from llmc.passes.edit import aten, is_call
from llmc.passes.find_entries import find_entries
from llmc.passes.find_key_biases import find_key_biases
from llmc.passes.find_linear_attention import find_linear_attention
from llmc.passes.last_token_logits import last_token_logits
from llmc.passes.lower_kernels import lower_kernels
from llmc.runner.adapter_store import fill_slot, lora_targets
from llmc.weights.checkpoint import BlockWriter, SomeOf
from llmc.weights.load import WeightSource
from llmc.weights.lora import LoraWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`switches` by pass; `kernels`: the ops whose fast versions are used (None: all);
    `kv_cache_dtype`: auto for the model's own dtype."""

    switches: Mapping[str, bool]
    kernels: Collection[str] | None = None
    level: int = 0
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to check, and the tokens to check it on."""

    built: BuiltModel
    captured: CapturedModel
    options: RewriteOptions
    open_weights: Callable[[], WeightSource]  # a new source each time: its converters run once
    cache_dir: Path
    sequences: tuple[TokenSequence, ...]
    steps: Sequence[Sequence[Chunk]]
    adapters: Sequence[LoraWeights] = ()  # LoRA; sequences refer to them by number, from 1

    def without_adapters(self) -> Subject:
        alone = tuple(replace(sequence, adapter=0) for sequence in self.sequences)
        return replace(self, sequences=alone, adapters=())

    @property
    def needed(self) -> frozenset[str]:
        """Passes without which the sequences can't be computed."""
        return frozenset({"apply_lora"} if self.adapters else ())

    @property
    def chooses(self) -> bool:
        """Whether tokens choose experts or keys: rounding can change such a choice."""
        ops = aten.topk.default, expert_linear.overload
        return any(is_call(node, *ops) for node in self.captured.graph.graph.nodes)

    def matches(self, p: Pass) -> bool:
        """Whether a pass changes anything in this model."""
        _, (_, report) = run_passes(self.captured.graph, (canonicalize(), p))
        return report.changed

    def changes(self, p: Pass, variant: Variant) -> bool:
        """Whether a pass changes anything when it runs in the pipeline of the variant."""
        return any(r.name == p.name and r.changed for r in self.rewrite(variant).reports)

    def rewrite(self, variant: Variant, extra: Sequence[Pass] = ()) -> Program:
        """The graph after all passes, with its kernels chosen. `extra` passes run after those of
        users."""
        options = replace(
            self.options,
            pipeline=replace(self.options.pipeline, kv_cache_dtype=variant.kv_cache_dtype),
            switches=variant.switches,
            extra=(*self.options.extra, *extra),
        )
        program = rewrite(self.captured, options)
        return replace(program, graph=_with_kernels(program.graph, variant.kernels))

    def run(self, variant: Variant) -> list[Tensor]:
        """Logits [T, V] of every sequence."""
        return self._run(self.rewrite(variant), variant.level).logits

    def run_tapped(self, variant: Variant) -> Run:
        """The same with a copy of the output of each layer; not compiled."""
        most = max(sum(c.count for c in chunks) for chunks in self.steps)
        captured = self.captured
        # The tap is the last early pass, so it sees each layer after users' passes.
        buffers = tap_buffers(captured.graph.graph, most, captured.dtype, captured.device)
        program = self.rewrite(variant, extra=(tap_layers(buffers=buffers),))
        return self._run(program, level=0, taps=buffers)

    def run_captured(self, passes: Sequence[Pass] = ()) -> list[Tensor]:
        """Run the captured graph itself, one sequence at a time: no paging, no fusion, no kernel,
        no adapter.

        Only parts that can't run as captured are replaced: loops for one number of tokens, and
        masks without values. Before `quantize_linears`, the rows of the output head are selected
        (all of them), since it tells the head, which keeps more bits, by that, and the weights that
        latent attention reads unquantized become attention's.
        """
        selects = any(p.name == "quantize_linears" for p in passes)
        meant: list[Pass] = [
            find_key_biases(max_positions=0, block_size=1),
            find_entries(),
            find_linear_attention(),
        ]
        if selects:
            on = [p for p in self.options.passes if p.is_on(self.options.switches)]
            meant += [last_token_logits(), *(p for p in on if p.name == "absorb_mla")]
        every = (canonicalize(), *meant, *passes, show_masks())
        graph, _ = run_passes(self.captured.graph, every)
        device = self.captured.device
        geometry = self._geometry(num_groups=1)
        step = lower(graph, self._bind(graph, geometry))
        logits = []
        for sequence in self.sequences:
            ids = torch.tensor(sequence.token_ids, device=device)
            positions = torch.arange(len(ids), device=device) + geometry.position_offset(sequence)
            given = {"token_ids": ids, "positions": positions}
            if selects:
                given["logits_index"] = torch.arange(len(ids), device=device)
            with torch.inference_mode():  # models without attention may not read positions
                out = step.call(**{name: given[name] for name in step.inputs})
            rows = out if selects else out[0]
            assert isinstance(rows, Tensor)
            logits.append(rows.to("cpu", torch.float32, copy=True))
        return logits

    def _run(self, program: Program, level: int, taps: Sequence[Tensor] = ()) -> Run:
        geometry = self._geometry(num_groups=max(1, len(program.groups)))
        bound = self._bind(program.graph, geometry)
        targets = lora_targets(program, bound)
        for slot, weights in enumerate(self.adapters, start=1):
            fill_slot(targets, slot, weights)
        logits, hidden = run_steps(
            self._step(program.graph, bound, level, geometry),
            self.sequences,
            self.steps,
            geometry,
            program.vocab_size,
            program.device,
            taps=taps,
        )
        return Run(logits=logits, hidden=hidden)

    def _geometry(self, num_groups: int) -> Geometry:
        options = self.options.pipeline
        return Geometry.of(
            self.sequences, options.block_size, num_groups, options.long_context_from
        )

    def _bind(self, graph: fx.GraphModule, geometry: Geometry) -> dict[str, Tensor]:
        captured = self.captured
        weights = graph_weights(
            graph,
            captured.parameters,
            self.open_weights(),
            dtype=captured.dtype,
            device=captured.device,
        )
        return bind(graph, weights, geometry, captured.device)

    def _step(
        self, graph: fx.GraphModule, bound: Mapping[str, Tensor], level: int, geometry: Geometry
    ) -> StepFunction:
        if level == 0:
            return lower(graph, bound)
        vocab_size, device = self.captured.vocab_size, self.captured.device
        rows = row_tables(self.sequences, geometry, vocab_size, device)
        return compile_step(graph, bound, rows.tables, level=level, cache_dir=self.cache_dir)


def _with_kernels(graph: fx.GraphModule, kernels: Collection[str] | None) -> fx.GraphModule:
    """The graph with fast versions of only these ops; the others use their references."""
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


class RoundedWeights:
    """Another source's weights, rounded to a dtype before they are cast to the requested one.

    `own`: the dtypes of some by name, such as those that stay in float32 in a 16-bit model.
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, own: Mapping[str, torch.dtype]
    ) -> None:
        self.is_thread_safe = source.is_thread_safe
        self._source = source
        self._dtype = dtype
        self._own = own

    def check(self, names: Iterable[str]) -> None:
        self._source.check(names)

    def reads_rows(self, name: str) -> bool:
        return self._source.reads_rows(name)

    def write_blocks(
        self, name: str, to: Quantization, out: BlockWriter, part: SomeOf | None = None
    ) -> None:
        self._source.write_blocks(name, to, out, part)

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        dtype = self._own.get(name, self._dtype)
        rounded = torch.empty(out.shape, dtype=dtype, device=out.device)
        self._source.fill(name, rounded, part)
        out.copy_(rounded)


def kernels_of(graph: fx.GraphModule) -> dict[str, str]:
    """op -> the library that computes it, for each of our ops in a graph with chosen kernels."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("llmc"):
            library, name = str(node.target).split(".")[:2]
            found[name] = library.removeprefix("llmc").removeprefix("_") or "reference"
    return found
