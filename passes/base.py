"""What a pass is, and the runner that applies a list of them and reports what each one did.

A pass is a function `GraphModule -> Notes` that edits its graph in place. The runner passes it a
copy, so the caller's graph is unchanged. Its docstring draws the graph before and after. It returns
notes on what it did not rewrite and why; what it did change is determined by comparing the graphs.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from llmc.errors import ConfigError
from llmc.passes.edit import cached_values

_GraphModule: type[fx.GraphModule] = fx.GraphModule
with contextlib.suppress(ImportError):  # private, so another torch may not have it
    from torch.fx._lazy_graph_module import _LazyGraphModule as _GraphModule

# Switched on and off like a pass, although it runs before them: it captures repeated layers once
# (llmc/compiler/layer_dedup/outline.py).
OUTLINE = "outline_layers"

Notes = list[str]
PassFn = Callable[..., Notes]
Place = Literal["early", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A named rewrite: `fn` with its options bound.

    `required`: the pass can't be switched off, because the engine needs what it inserts.
    `rounds`: a built-in pass that computes the same values with fewer bits.
    The other fields are for user passes: `place` is where in the pipeline they run (user.py),
    `changes_model` says that they change the model's output on purpose, and `cached` says whether
    their result can be cached for the next start.
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

    def is_on(self, switches: Mapping[str, bool]) -> bool:
        """Whether the pass runs with these switches, by name."""
        return switches.get(self.name, True)

    def run(self, gm: fx.GraphModule) -> Notes:
        return self.fn(gm, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: the ops it removed and added, and what it did not rewrite and why.

    `changed` is also true if the ops are the same and only their inputs differ.
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
    """Turn a function `(gm, *, options) -> notes` into a pass factory; a call binds the options.

    The docstring must have `Before:` and `After:` parts, or importing the module raises TypeError.
    See `Pass` for the keywords. Use `cached=False` for a pass that inserts one of the caller's
    tensors into the graph to be written to.
    """

    def define(fn: PassFn) -> Callable[..., Pass]:
        doc = fn.__doc__ or ""
        if "Before:" not in doc or "After:" not in doc:
            raise TypeError(f"pass {fn.__name__} needs a docstring with `Before:` and `After:`")

        def bind(**options: Any) -> Pass:
            # TypeError now, and not when the pass runs
            inspect.signature(fn).bind(None, **options)
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
    """The number of calls of each op."""
    return Counter(op_name(node) for node in gm.graph.nodes if node.op == "call_function")


def _edges(gm: fx.GraphModule) -> int:
    """A hash that changes if any node or any node's arguments change."""
    return hash(tuple((n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes))


def check_names(switches: Mapping[str, bool], passes: Iterable[Pass]) -> None:
    """Raise ConfigError for a switch that names an unknown pass or turns off a required one."""
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
    """Apply the passes in order to a copy of the graph; `gm` itself is not modified."""
    switches = switches or {}
    check_names(switches, passes)
    reports = []
    current = graph_module(gm, copy_graph(gm.graph))
    before, edges = histogram(current), _edges(current)
    for p in passes:
        if not p.is_on(switches):
            reports.append(
                PassReport(name=p.name, seconds=0, removed={}, added={}, notes=(), enabled=False)
            )
            continue
        start = time.perf_counter()
        with cached_values():
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
    """A module that generates its Python code when first called: most are only rewritten."""
    return _GraphModule(root, graph)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph: separate nodes with the same names and meta."""
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
