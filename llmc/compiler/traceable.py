"""Makes code traceable that Dynamo can't handle on the meta device, or passes don't see through.

Numbers that become tensors have no data on meta. `torch.tensor(2.0)` is replaced with a fill.
In Dynamo's graph, `x[..., [-2], :]` becomes a slice, and the list of `x[..., [3, 5]]` fills.
Torch's attention becomes its parts. Messages to logs are left out.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors

_tensor = torch.tensor


def _constant(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.tensor` of plain numbers, as fills: Dynamo turns the original into a tensor with data,
    which does not exist on meta."""
    if isinstance(data, bool):
        dtype = dtype or torch.bool
    elif isinstance(data, int):
        dtype = dtype or torch.int64
    elif isinstance(data, float):
        dtype = dtype or torch.get_default_dtype()
    elif isinstance(data, list | tuple) and not data:  # how caches begin
        return torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=device)
    elif isinstance(data, list | tuple) and all(_is_number(x) for x in data):
        return torch.stack([_constant(x, dtype=dtype, device=device) for x in data])
    else:
        return _tensor(data, dtype=dtype, device=device)
    return torch.full((), data, dtype=dtype, device=device)


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in parts, of which passes/find_attention.py finds the meaning
    as in other code."""
    if enable_gqa:
        group = query.size(-3) // key.size(-3)
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * factor
    if is_causal:
        shape = query.size(-2), key.size(-2)
        later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


@contextmanager
def spelled_attention(graph: fx.Graph) -> Iterator[None]:
    """Inside this context, Dynamo's graph computes torch's attention in parts, also where code
    imported it by name, or calls it in torch's own functions, which Dynamo does not look into."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            node.target = _attention
    with mock.patch.object(F, "scaled_dot_product_attention", _attention):
        yield


@contextmanager
def traceable_torch() -> Iterator[None]:
    """Inside this context, captured models use the replacements above."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable  # late: slow to import

    init, create = FakeTensorMode.__init__, AutocastModeVariable.create

    def lenient(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs | {"allow_non_fake_inputs": True}))

    def autocast(*args: Any) -> Any:
        made = create(*args)
        device, _, enabled, _ = made.target_values
        if device == "meta" and not enabled:  # meta has no autocast that could be disabled
            made.target_values = ["cpu", *made.target_values[1:]]
        return made

    with (
        mock.patch.object(torch, "tensor", _constant),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(FakeTensorMode, "__init__", lenient),
        mock.patch.object(AutocastModeVariable, "create", autocast),
        torch._dynamo.config.patch(ignore_logging_functions=_messages()),
        # torch 2.11 logs an error with a trace, as it can't write that option as JSON
        unlogged("torch._dynamo.metrics_context"),
    ):
        yield


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Inside this context, the logger of that name logs nothing."""
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _messages() -> set[Any]:
    """Functions that tell the user something, and compute nothing."""
    kinds = ("debug", "info", "warning", "warning_once", "warning_advice", "error", "log")
    methods = (getattr(logging.Logger, kind, None) for kind in kinds)  # transformers adds some
    return {warnings.warn, print, *(method for method in methods if method is not None)}


@contextmanager
def meta_by_default() -> Iterator[None]:
    """Inside this context, captured code that names no device makes tensors on meta."""
    from torch._dynamo.variables import torch as dynamo_torch  # late: slow to import

    known = dynamo_torch.get_overridable_functions()
    makers = _device_constructors()
    # Dynamo of torch 2.11 applies the default only to some: not to arange, for example
    with (
        torch.device("meta"),
        mock.patch.object(dynamo_torch, "get_overridable_functions", lambda: known | makers),
    ):
        yield


def lists_to_slices(graph: fx.Graph) -> None:
    """x[..., [i], :] -> x[..., i : i + 1, :], in Dynamo's graph of Python calls.

    Not next to other lists or tensors: together, they select elements, not a part of x. All other
    lists of integers become tensors, since those that torch makes of them have no data on meta.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (operator.getitem, operator.setitem):
            continue
        x, index, *value = node.args
        each = index if isinstance(index, tuple) else (index,)
        if node.target is operator.getitem and sum(map(_selects, each)) == 1:
            each = tuple(map(_slice_of, each))
        device = getattr(x.meta.get("example_value"), "device", None)
        with graph.inserting_before(node):
            each = tuple(
                graph.call_function(_constant, (i,), {"device": device}) if _is_list(i) else i
                for i in each
            )
        node.args = (x, each if isinstance(index, tuple) else each[0], *value)


def _selects(index: Any) -> bool:
    """Whether it is a list or a tensor of numbers."""
    if isinstance(index, fx.Node):
        return not isinstance(index.meta.get("example_value"), torch.SymInt | int)
    return isinstance(index, list)


def _is_list(index: Any) -> bool:
    return isinstance(index, list) and bool(index) and all(type(i) is int for i in index)


def _slice_of(index: Any) -> Any:
    if _is_list(index) and len(index) == 1:
        return slice(index[0], index[0] + 1 or None)
    return index
