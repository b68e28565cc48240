"""Replaces routed experts that a model implements itself with `expert_linear` during capture.

Most experts use transformers' interface (interface.py). Others are recognized by their signature:
here, a linear over rows that are sorted by expert, with the number of rows of each expert. Such
code reads these numbers out of a tensor, which changes from step to step; here they stay in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from llmc.kernels.expert_linear import expert_linear


def use_sorted_experts(model: nn.Module) -> None:
    """Make linears over sorted rows call `expert_linear`, and callers pass a tensor of counts."""
    linears = [m for m in model.modules() if _is_sorted_linear(m)]
    for linear in linears:
        linear.forward = MethodType(_sorted_linear, linear)
    kinds = {type(m) for m in model.modules()} if linears else set()
    counting = {k: f for k in kinds if (f := _keeping_counts(k.forward)) is not None}
    for module in model.modules():
        if type(module) in counting:
            module.forward = MethodType(counting[type(module)], module)


def _is_sorted_linear(module: nn.Module) -> bool:
    weight = vars(module)["_parameters"].get("weight")
    if weight is None or weight.dim() != 3:
        return False
    return list(inspect.signature(module.forward).parameters) == ["inputs", "expert_size"]


def _sorted_linear(self: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
    """inputs [S, K], sorted by expert; expert_size [E], rows per expert -> [S, N]"""
    expert = torch.repeat_interleave(expert_size, output_size=inputs.shape[0])
    out: Tensor = expert_linear.overload(inputs, self.weight, None, expert, False)
    return out


def _keeping_counts(function: Any) -> Callable[..., Any] | None:
    """The same function without `tolist`: tensors stay tensors. None if it does not call it."""
    code = getattr(function, "__code__", None)
    if code is None or "tolist" not in code.co_names:
        return None
    names = tuple("detach" if name == "tolist" else name for name in code.co_names)
    made = FunctionType(
        code.replace(co_names=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
