"""How recurrent layers call llmc: transformers' replaceable functions, by their public names.

Modeling code calls its convolution, delta rule and state-space scan through functions that
transformers can replace with kernels from the hub. During capture, those names refer to the
functions here. Each calls one of our ops, which handles packed requests and keeps its state in
slots. The branch for a new prompt is captured; the ops make it valid for every step.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmc.kernels.causal_conv import causal_conv
from llmc.kernels.decayed_softmax import decayed_softmax
from llmc.kernels.delta_rule import delta_rule
from llmc.kernels.linear_recurrence import linear_recurrence
from llmc.kernels.selective_scan import selective_scan

_FRESH = (None, None, None, None)  # no state yet: passes/slot_state.py adds one to every call
_L2_EPS = 1e-6  # added under the square root, as in the hub's functions


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """[1, C, T] -> [1, C, T]"""
    from transformers.activations import ACT2FN

    out = causal_conv.overload(hidden_states[0].T, weight, bias, None, None, None, *_FRESH).T[None]
    return out if activation is None else ACT2FN[activation](out)  # type: ignore[no-any-return]


def _delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key [1, T, G, D], value [1, T, H, Dv], g [1, T, H] or [1, T, H, D], beta [1, T, H]
    -> ([1, T, H, Dv], None)"""
    scale, eps = query.shape[-1] ** -0.5, _L2_EPS if use_qk_l2norm_in_kernel else None
    decay = g[0] if g.dim() == 4 else g[0][..., None]
    inputs = (query[0], key[0], value[0], decay, beta[0])
    return delta_rule.overload(*inputs, scale, eps, None, None, None, *_FRESH)[None], None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """A state per channel: hidden, dt, z [1, C, T], A [C, N], B and C [1, N, T] -> [1, C, T]"""
    dtype = hidden_states.dtype if D is None else torch.promote_types(hidden_states.dtype, D.dtype)
    y: Tensor = selective_scan.overload(
        hidden_states[0].T[:, :, None],
        dt[0].T,
        A.float(),
        B[0].T[:, None],
        C[0].T[:, None],
        D,
        None if z is None else z[0].T[:, :, None],
        delta_bias,
        delta_softplus,
        -math.inf,
        math.inf,
        dtype,
        *_FRESH,
    )
    return y[:, :, 0].T[None]


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """A decay per head: hidden [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]"""
    y: Tensor = selective_scan.overload(
        hidden_states[0],
        dt[0],
        A.float()[:, None],
        B[0],
        C[0],
        D,
        None if z is None else z[0],
        dt_bias,
        dt_softplus,
        dt_limit[0],
        dt_limit[1],
        torch.float32,
        *_FRESH,
    )
    return y[None]


# Suffixes of transformers' names for them -> ours. Longer names with the same suffix are different.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "chunk_gated_delta_rule": _delta,
    "chunk_kda": _delta,
    "selective_scan_fn": _scan,
    "_chunk_scan_combined": _chunk_scan,
}


def _recurrence(
    self: nn.Module,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, None]:
    """hidden, gate [1, T, C], reset [1, T, 1] -> ([1, T, C], None)"""
    decay = (recurrent_gate * ~reset)[0]
    return linear_recurrence.overload(hidden_states[0], decay, *_FRESH)[None], None


# Methods that loop over the tokens of a linear recurrence, by their names in modeling code.
METHODS: dict[str, Callable[..., Any]] = {"_rnn_scan": _recurrence}


def _time_mixing(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, Any]:
    """key, value [1, T, C], decay and first [C] -> [1, T, C]"""
    decay = -torch.exp(time_decay.float())
    return decayed_softmax.overload(key[0], value[0], decay, time_first, *_FRESH)[None], state


# Functions of modeling code that loop over the tokens, by the names of their parameters.
SIGNATURES: dict[tuple[str, ...], Callable[..., Any]] = {
    tuple(inspect.signature(_time_mixing).parameters): _time_mixing
}


def _ours(function: Any) -> Callable[..., Any] | None:
    """The replacement for a function of modeling code, if there is one."""
    name = public_name(function)
    if name:
        return next((f for end, f in FUNCTIONS.items() if name.endswith(end)), None)
    if not inspect.isfunction(function):
        return None
    code = function.__code__
    return SIGNATURES.get(code.co_varnames[: code.co_argcount])


def public_name(function: Any) -> str:
    """The name by which transformers makes a function replaceable; "" for any other function."""
    if not inspect.isfunction(function):
        return ""
    name = inspect.getclosurevars(function).nonlocals.get("func_name", "")
    return name if isinstance(name, str) else ""


@contextmanager
def replaced_functions(model: nn.Module) -> Iterator[None]:
    """Inside this context, `model`'s Python modules call our functions instead of transformers'."""
    files = {type(m).__module__ for m in model.modules()}
    old: list[tuple[Any, str, Any]] = []
    for file in sorted(files & set(sys.modules)):
        module = sys.modules[file]
        for attribute, function in list(vars(module).items()):
            ours = _ours(function)
            if ours is not None:
                old.append((module, attribute, function))
                setattr(module, attribute, ours)
    for kind in {type(m) for m in model.modules()}:
        for name, method in METHODS.items():
            if name in vars(kind):
                old.append((kind, name, vars(kind)[name]))
                setattr(kind, name, method)
    try:
        yield
    finally:
        for module, attribute, function in old:
            setattr(module, attribute, function)
