"""Determines which version of each op will run, without building or launching any.

It chooses as `passes/lower_kernels.py` does, except that C++ ops that are not built yet, and Triton
ops on a machine without a GPU, count as available.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from llmc.inspect.stages import Stage
from llmc.kernels.collectives import all_gather, all_reduce, first_rank
from llmc.kernels.cpu.build import is_obtainable
from llmc.passes.base import op_name
from llmc.passes.lower_kernels import op_calls

COLLECTIVES = (all_reduce.name, all_gather.name, first_rank.name)
_LANGUAGES = {"cpu": "C++", "triton": "Triton", "torch": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """`runs` is C++, Triton, reference or torch."""

    op: str
    count: int
    runs: str


def choose_kernels(
    stage: Stage, device: torch.device, copies: Callable[[int], int]
) -> tuple[KernelChoice, ...]:
    """Our ops first; the rest run in torch, and in Inductor's code from -O2 on.

    `copies(layer)` is the number of the model's layers that the captured one represents.
    """
    present = _present(device)
    counts: Counter[tuple[str, str]] = Counter()
    rest = 0
    for node, call in op_calls(stage.graph.graph):
        layers = copies(stage.layers.of[node])
        if call is None:
            rest += 0 if "getitem" in op_name(node) else layers
            continue
        args = fx.node.map_arg(call.args, lambda n: n.meta.get("val"))
        impl = call.op.best(args, present=present)
        fallback = "torch" if call.of_torch else "reference"
        counts[call.op.name, _LANGUAGES[impl.name] if impl else fallback] += layers
    found = [KernelChoice(op=op, count=n, runs=runs) for (op, runs), n in sorted(counts.items())]
    return (*found, KernelChoice(op="everything else", count=rest, runs="torch"))


def _present(device: torch.device) -> set[str]:
    if device.type == "cpu":
        importlib.import_module("llmc.kernels.cpu")
        return {"cpu", "torch"} if is_obtainable() else {"torch"}
    if importlib.util.find_spec("triton") is None:
        return {"torch"}
    importlib.import_module("llmc.kernels.triton")
    return {"triton", "torch"}
