"""Small labeled graphs for tests of passes: traced from a function, run by the roles of inputs.

gm = trace(lambda x, w: F.linear(x, w), x=step(torch.randn(1, 5, 8), dynamic=1), w=weight("w", t))
run(gm, values)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from llmc.kernels.cpu.pages import HugePages
from llmc.passes.base import Pass, PassReport, histogram, remove_dead_code, run_passes
from llmc.passes.inputs import (
    AdapterInput,
    CacheInput,
    ConstantInput,
    Input,
    StepInput,
    WeightInput,
    input_of,
)
from llmc.weights.checkpoint import SomeOf
from llmc.weights.load import make_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """An example input, its dynamic dimension, and its role (None: a step input with its name)."""

    tensor: Tensor
    role: Input | None = None
    dynamic: int | None = None


def step(tensor: Tensor, dynamic: int | None = 0) -> Arg:
    return Arg(tensor=tensor, dynamic=dynamic)


def weight(name: str, tensor: Tensor) -> Arg:
    return Arg(tensor=tensor, role=WeightInput(parts=(name,)))


def constant(tensor: Tensor) -> Arg:
    return Arg(tensor=tensor, role=ConstantInput(tensor=tensor))


def cache(layer: int, part: Any, dtype: torch.dtype = torch.float32) -> Arg:
    return Arg(tensor=torch.empty(0, dtype=dtype), role=CacheInput(layer=layer, part=part))


def trace(fn: Callable[..., Any], **inputs: Arg) -> fx.GraphModule:
    """The ATen graph of `fn(*inputs)`; equal dynamic sizes share one symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for arg in inputs.values():
        sizes = [
            DimDynamic.DYNAMIC if d == arg.dynamic else DimDynamic.STATIC
            for d in range(arg.tensor.dim())
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(arg.tensor, symbolic_context=context))
    with torch.no_grad(), mode:
        gm = make_fx(fn, pre_dispatch=True)(*fakes)
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, (name, arg) in zip(nodes, inputs.items(), strict=True):
        node.meta["input"] = arg.role or StepInput(name=name)
    remove_dead_code(gm.graph)
    gm.recompile()
    return gm


class _Plain:
    """A weight source over plain tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def reads_rows(self, name: str) -> bool:
        return True

    def fill(self, name: str, out: Tensor, part: SomeOf | None = None) -> None:
        whole = self.tensors[name]
        out.copy_(whole if part is None else part.of(whole))


def draw_adapter(role: AdapterInput, shape: tuple[int, ...]) -> Tensor:
    """The contents of a graph's adapter slots: random numbers that depend only on the role."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(role).encode()))
    return torch.randn(shape, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The inputs of a graph: step inputs and weights by name, caches by (layer, part)."""

    step: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    caches: Mapping[tuple[int, str], Tensor] | None = None
    rank: int = 0

    @staticmethod
    def of(caches: Mapping[tuple[int, str], Tensor] | None = None, **inputs: Arg) -> Values:
        """The example inputs themselves."""
        roles = {name: arg.role for name, arg in inputs.items()}
        return Values(
            step={n: a.tensor for n, a in inputs.items() if roles[n] is None},
            weights={
                role.parts[0]: inputs[n].tensor
                for n, role in roles.items()
                if isinstance(role, WeightInput)
            },
            caches=caches,
        )

    def get(self, node: fx.Node) -> Tensor:
        role = input_of(node)
        if isinstance(role, StepInput):
            return self.step[role.name]
        if isinstance(role, ConstantInput):
            return role.tensor if role.shard is None else role.shard.of(role.tensor, self.rank)
        if isinstance(role, CacheInput):
            caches = self.caches
            return torch.empty(0) if caches is None else caches[role.layer, role.part]
        if isinstance(role, AdapterInput):
            return draw_adapter(role, tuple(node.meta["val"].shape))
        assert isinstance(role, WeightInput)
        shapes = {name: tuple(t.shape) for name, t in self.weights.items()}
        dtype = torch.float32 if role.quantized else node.meta["val"].dtype
        source = _Plain(self.weights)
        memory = HugePages(torch.device("cpu"))
        return make_weights(role, shapes, dtype, source, memory, self.rank)[role]


def run(gm: fx.GraphModule, values: Values) -> Any:
    """Execute a graph; weights are created by their recipes."""
    inputs = [values.get(n) for n in gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        return fx.Interpreter(gm).run(*inputs)


def apply(gm: fx.GraphModule, *passes: Pass) -> tuple[fx.GraphModule, list[PassReport]]:
    return run_passes(gm, passes)


def ops(gm: fx.GraphModule) -> dict[str, int]:
    """Calls by op, without views and lookups that only move data."""
    return {
        name: count
        for name, count in histogram(gm).items()
        if not name.startswith(("aten.unsqueeze", "aten.squeeze", "aten.transpose", "<built-in"))
    }


def assert_same(
    got: fx.GraphModule, want: fx.GraphModule, values: Values, tolerance: float = 1e-5
) -> None:
    """Check that both graphs give the same numbers, up to rounding from the order of summation."""
    torch.testing.assert_close(run(got, values), run(want, values), rtol=tolerance, atol=tolerance)


def assert_idempotent(gm: fx.GraphModule, make_pass: Pass) -> None:
    """Check that a second run of a pass changes nothing."""
    once, _ = apply(gm, make_pass)
    twice, (report,) = apply(once, make_pass)
    assert not report.added and not report.removed, str(report)
    assert [str(n) for n in once.graph.nodes] == [str(n) for n in twice.graph.nodes]


def roles(gm: fx.GraphModule, kind: type) -> list[Any]:
    """The roles of one kind among the placeholders, in order."""
    found: Sequence[Any] = [input_of(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return [role for role in found if isinstance(role, kind)]
