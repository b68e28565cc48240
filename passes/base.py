"""What a pass is, and the runner that applies a list of them and reports what each one did.

A pass is a function `GraphModule -> None` that edits the graph it is given in place; the runner
gives it a copy, so the caller's graph stays as it was. Its docstring draws the graph before and
after. It returns notes on what it did not rewrite and why; what it changed is read off the graph.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from llmc.errors import ConfigError
from llmc.passes.edit import remembered_values

try:
    from torch.fx._lazy_graph_module import _LazyGraphModule as _GraphModule
except ImportError:  # private, so another torch may not have it
    _GraphModule = fx.GraphModule

# Switched like a pass, though it comes before them: layers that repeat are captured once
# (llmc/compiler/layer_dedup/outline.py).
OUTLINE = "outline_layers"

Notes = list[str]
PassFn = Callable[..., Notes]
Place = Literal["early", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A named rewrite: `fn` with its options bound.

    `required` ones can't be switched off: the engine needs what they insert. The rest is for
    passes of users: where they run (user.py), whether they mean to change what the model answers,
    and whether their result may be kept for the next start. `rounds`: one of ours that computes the
    same in fewer bits.
    """

    name: str
    fn: PassFn
    doc: str
    options: Mapping[str, Any] = field(default_factory=dict)
    required: bool = False
    place: Place = "early"
    changes_model: bool = False
    rounds: bool = False
    cached: bool = True

    def run(self, gm: fx.GraphModule) -> Notes:
        return self.fn(gm, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: ops that disappeared and appeared, and what it did not rewrite and why.

    `changed` is true too where ops stayed and only read something else.
    """

    name: str
    seconds: float
    removed: Mapping[str, int]
    added: Mapping[str, int]
    notes: Sequence[str]
    enabled: bool = True
    changed: bool = False

    def __str__(self) -> str:
        if not self.enabled:
            return f"{self.name}: off"
        minus = ", ".join(f"{n} {op}" for op, n in sorted(self.removed.items()))
        plus = ", ".join(f"{n} {op}" for op, n in sorted(self.added.items()))
        same = "other inputs" if self.changed else "no match"
        change = f"-[{minus}] +[{plus}]" if minus or plus else same
        return f"{self.name}: {change}" + "".join(f"; {note}" for note in self.notes)


def graph_pass(
    *,
    required: bool = False,
    place: Place = "early",
    changes_model: bool = False,
    rounds: bool = False,
    cached: bool = True,
) -> Callable[[PassFn], Callable[..., Pass]]:
    """Make a pass factory of a function `(gm, *, options) -> notes`; calling it binds the options.

    The docstring must have `Before:` and `After:` parts; TypeError at import when it does not.
    The keywords are explained at `Pass`; `cached=False` is for a pass that puts a tensor of the
    caller into the graph to be written to.
    """

    def define(fn: PassFn) -> Callable[..., Pass]:
        doc = fn.__doc__ or ""
        if "Before:" not in doc or "After:" not in doc:
            raise TypeError(f"pass {fn.__name__} needs a docstring with `Before:` and `After:`")

        def bind(**options: Any) -> Pass:
            return Pass(
                name=fn.__name__,
                fn=fn,
                doc=doc,
                options=options,
                required=required,
                place=place,
                changes_model=changes_model,
                rounds=rounds,
                cached=cached,
            )

        bind.__name__, bind.__doc__ = fn.__name__, doc
        return bind

    return define


def op_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


def histogram(gm: fx.GraphModule) -> Counter[str]:
    """How often each op is called."""
    return Counter(op_name(node) for node in gm.graph.nodes if node.op == "call_function")


def _edges(gm: fx.GraphModule) -> int:
    """A number that differs where a node, or what a node is given, does."""
    return hash(tuple((n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes))


def check_names(switches: Mapping[str, bool], passes: Iterable[Pass]) -> None:
    """ConfigError for a switch that names no pass, or switches off a required one."""
    known = {p.name: p for p in passes}
    for name, enabled in switches.items():
        if name == OUTLINE:
            continue
        if name not in known:
            raise ConfigError(
                f"unknown pass {name!r}; the pipeline has {', '.join((*known, OUTLINE))}"
            )
        if known[name].required and not enabled:
            raise ConfigError(f"pass {name!r} can't be switched off: the engine needs it")


def run_passes(
    gm: fx.GraphModule, passes: Sequence[Pass], switches: Mapping[str, bool] | None = None
) -> tuple[fx.GraphModule, list[PassReport]]:
    """Apply the passes in order to a copy of the graph; the graph that was given stays."""
    switches = switches or {}
    check_names(switches, passes)
    reports = []
    current = graph_module(gm, copy_graph(gm.graph))
    before, edges = histogram(current), _edges(current)
    for p in passes:
        if not switches.get(p.name, True):
            reports.append(
                PassReport(name=p.name, seconds=0, removed={}, added={}, notes=(), enabled=False)
            )
            continue
        start = time.perf_counter()
        with remembered_values():
            notes = p.run(current)
        remove_dead_code(current.graph)
        current.graph.lint()
        after, edges_after = histogram(current), _edges(current)
        reports.append(
            PassReport(
                name=p.name,
                seconds=time.perf_counter() - start,
                removed=dict(before - after),
                added=dict(after - before),
                notes=tuple(notes),
                changed=edges_after != edges,
            )
        )
        before, edges = after, edges_after
    current.recompile()
    return current, reports


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module whose Python code is written when it is first called: most are only rewritten."""
    return _GraphModule(root, graph)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A separate graph of the same nodes, with the same names and meta."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, lambda n: env[n])
    return copy


def remove_dead_code(graph: fx.Graph) -> None:
    """Drop calls and placeholders without users; ops that write in place are kept."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output":
            continue
        if node.op == "call_function" and writes(node):
            continue
        graph.erase_node(node)


def writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
