"""The rewritten graph -> Inductor's code for it (level -O2 and up), compiled once for all sizes.

The numbers of tokens, rows and samples stay symbolic. Inductor treats sizes 0 and 1 as constants,
so a compiled step is called with at least MIN_SIZE of each (the runner pads), and one graph works
for every step. Results are cached on disk for the next start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SymbolicContext,
)

from llmc.compiler.lower import StepFunction
from llmc.kernels.step_inputs import input_named
from llmc.passes.base import copy_graph
from llmc.passes.inputs import StepInput, input_of

MIN_SIZE = 2

# Example sizes, all different, because equal sizes would share a symbol.
_SIZES = {"T": 23, "R": 11, "R + 1": 12, "S": 7, "blocks": 5}
_SIZES |= {"2 + 2 * prompts": 16, "2 + 2 * long prompts": 18}


def compile_step(
    gm: fx.GraphModule,
    bound: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    *,
    level: int,
    cache_dir: Path,
) -> StepFunction:
    """Compile a step. `bound` as in `lower.lower`; `tables`: step inputs of fixed shape, by name.

    Takes seconds to minutes. Raises whatever Inductor raises; the caller then keeps its old step.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir / "inductor"))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    copy = fx.GraphModule(gm, copy_graph(gm.graph))
    names: list[str] = []
    fixed: list[Tensor | None] = []
    fakes: list[Any] = []
    for node in copy.graph.nodes:
        if node.op != "placeholder":
            continue
        role = input_of(node)
        if isinstance(role, StepInput):
            names.append(role.name)
            fixed.append(None)
            fakes.append(_fake_step_input(mode, role.name, node.meta["val"], tables))
        else:
            names.append(node.name)
            fixed.append(bound[node.name])
            fakes.append(mode.from_tensor(bound[node.name], static_shapes=True))
        node.meta = {"val": fakes[-1]}
    _only_calls(copy.graph)
    copy.recompile()
    artifact = torch._inductor.standalone_compile(
        copy,
        fakes,
        dynamic_shapes="from_graph",
        options={"config_patches": _config(level, next(iter(tables.values())).device)},
    )
    return _bind(artifact, names, fixed, level)


def _config(level: int, device: torch.device) -> dict[str, Any]:
    """Inductor's options. On a GPU it measures kernels in another process: here, that could run
    while the engine's thread captures a graph, and would end the capture."""
    is_tuned = level >= 3
    return {
        "max_autotune": is_tuned,
        "autotune_in_subproc": is_tuned and device.type == "cuda",
    }


def _fake_step_input(
    mode: FakeTensorMode, name: str, val: Tensor, tables: Mapping[str, Tensor]
) -> Tensor:
    if name in tables:
        return mode.from_tensor(tables[name], static_shapes=True)
    example = torch.empty(input_named(name).shape(_SIZES), dtype=val.dtype, device=val.device)
    context: SymbolicContext = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK] * example.dim()
    )
    return mode.from_tensor(example, symbolic_context=context)


def _only_calls(graph: fx.Graph) -> None:
    """Drop the values of calls: they are of another fake mode, and Inductor computes its own."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta = {}


def _bind(artifact: Any, names: list[str], fixed: list[Tensor | None], level: int) -> StepFunction:
    inputs = tuple(name for name, tensor in zip(names, fixed, strict=True) if tensor is None)

    def call(**step: Tensor) -> tuple[Tensor, Tensor]:
        args = [step[n] if t is None else t for n, t in zip(names, fixed, strict=True)]
        token, logits = artifact(*args)
        return token, logits

    return StepFunction(call=call, inputs=inputs, source="", level=level, min_size=MIN_SIZE)
