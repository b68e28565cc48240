"""The graph after every pass, and what each pass did in which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from llmc.compiler.program import CapturedModel, RewriteOptions, rewrite
from llmc.passes.base import Pass, PassReport, histogram, op_name
from llmc.passes.layers import Layers, find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A graph and the pass that made it; None for the captured graph."""

    graph: fx.GraphModule
    layers: Layers
    rewrite: Pass | None
    report: PassReport | None

    @property
    def num_ops(self) -> int:
        return sum(histogram(self.graph).values())


def run_stages(captured: CapturedModel, options: RewriteOptions) -> list[Stage]:
    """The captured graph, then the graph after each pass, unchanged by a pass that is off."""
    graph = captured.graph
    stages = [Stage(graph=graph, layers=find_layers(graph.graph), rewrite=None, report=None)]

    def add(p: Pass, graph: fx.GraphModule, report: PassReport) -> None:
        layers = find_layers(graph.graph)
        stages.append(Stage(graph=graph, layers=layers, rewrite=p, report=report))

    rewrite(captured, options, on_pass=add)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Removed and added ops in the whole model, and the captured layers in which they are."""

    removed: int
    added: int
    layers: tuple[int, ...]


def change(before: Stage, after: Stage, copies: Callable[[int], int]) -> Change:
    """The change between two stages. `copies(layer)`: how many layers a captured one represents."""
    old, new = _ops(before), _ops(after)
    gone = [layer for op, layer in old.items() if op not in new]
    came = [layer for op, layer in new.items() if op not in old]
    return Change(
        removed=sum(map(copies, gone)),
        added=sum(map(copies, came)),
        layers=tuple(sorted({*gone, *came})),
    )


def _ops(stage: Stage) -> dict[tuple[str, str], int]:
    """(name, op) of every call -> its layer."""
    return {
        (node.name, op_name(node)): stage.layers.of[node]
        for node in stage.graph.graph.nodes
        if node.op == "call_function"
    }
