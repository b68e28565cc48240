"""Config -> the unmodified model on the meta device, wired to llmc's attention.

First stage of the compiler. Nothing here reads weights: parameters have shapes only; buffers that
the model computes from its config (rotary frequencies) get their real values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmc.compiler import interface
from llmc.errors import CheckpointError, CompileError


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The model's module on meta, and the buffers that it computes from its config."""

    module: nn.Module
    config: Any
    dtype: torch.dtype
    buffers: dict[str, Tensor]  # name -> value, for buffers that no checkpoint holds


def build(config: Any, dtype: torch.dtype) -> BuiltModel:
    """Raise CheckpointError where the config is no decoder-only causal language model."""
    from transformers import AutoModelForCausalLM

    interface.register()
    config._attn_implementation = interface.NAME
    for side_output in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, side_output, False):
            setattr(config, side_output, False)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, attn_implementation=interface.NAME, dtype=dtype
            )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RuntimeError) as e:
        raise CheckpointError(
            f"transformers can't build a causal language model from this config "
            f"({type(config).__name__}): {_first_line(e)}"
        ) from e
    module.eval()
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters:
        raise CompileError(
            f"{type(module).__name__}.forward takes no position_ids, so requests can't be packed"
        )
    interface.use_experts(module)
    buffers = _materialize_buffers(module)
    # Which modules attend is known only once their code has run; an unused buffer costs nothing.
    for child in module.modules():
        for cache in (interface.KEY_CACHE, interface.VALUE_CACHE):
            child.register_buffer(cache, torch.empty(0, device="meta"), persistent=False)
    return BuiltModel(module=module, config=config, dtype=dtype, buffers=buffers)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _materialize_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that state_dict leaves out, made by the model's own initializer.

    transformers' loader relies on the same `_init_weights` to fill them after a meta build. They
    go back to meta afterwards, so that the whole module can be traced on one device.
    """
    persistent = set(module.state_dict())
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for prefix, child in module.named_modules():
            names = [
                n
                for n, b in child._buffers.items()
                if b is not None and f"{prefix}.{n}".lstrip(".") not in persistent
            ]
            if not names:
                continue
            old = {n: child._buffers[n] for n in names}
            for n in names:
                child._buffers[n] = _unset_like(old[n])
            module._init_weights(child)  # type: ignore[operator]
            for n in names:
                value = child._buffers[n]
                if value is not None:
                    values[f"{prefix}.{n}".lstrip(".")] = value
                child._buffers[n] = old[n]
    return values


def _unset_like(buffer: Tensor | None) -> Tensor | None:
    """A CPU tensor of the same shape full of NaN (of the lowest value for integers)."""
    if buffer is None:
        return None
    if buffer.is_floating_point():
        return torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
    low = 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
    return torch.full(buffer.shape, low, dtype=buffer.dtype)


def is_unset(value: Tensor) -> bool:
    """Whether the model's initializer left a buffer as `_unset_like` made it."""
    if value.numel() == 0:
        return False
    if value.is_floating_point():
        return bool(value.isnan().any())
    return value.dtype != torch.bool and bool((value == torch.iinfo(value.dtype).min).any())
